"""`python -m rlhf_pipeline` is the command `rlhf-pipeline`."""

from __future__ import annotations

import sys

from rlhf_pipeline.cli import main

sys.exit(main())
