"""Models and reference log-probs for the tests of policies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from tests.rlhf_pipeline.model_families import family_model


@pytest.fixture
def make_model() -> Callable[..., PreTrainedModel]:
    """A factory: `make_model("qwen2", attention="sdpa", seed=0, **config)`."""
    return family_model


@pytest.fixture
def oracle() -> Callable[..., torch.Tensor]:
    """Log-probs of one sequence by the model's own logits, in float64, position by position."""

    def score(model: PreTrainedModel, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([token_ids])).logits[0].double() / temperature
        out = [0.0]
        for t in range(1, len(token_ids)):
            row = logits[t - 1]
            peak = row.max()
            out.append(float(row[token_ids[t]] - peak - (row - peak).exp().sum().log()))
        return torch.tensor(out, dtype=torch.float64)

    return score
