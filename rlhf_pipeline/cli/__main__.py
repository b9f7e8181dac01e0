"""`python -m rlhf_pipeline.cli`, for a checkout that is not installed."""

from __future__ import annotations

import sys

from rlhf_pipeline.cli import main

sys.exit(main())
