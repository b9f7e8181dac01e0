"""The tiny models of the policies' tests."""

from __future__ import annotations

from tests.rlhf_pipeline.policies.conftest import make_model, oracle

__all__ = ["make_model", "oracle"]
