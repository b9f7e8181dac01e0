"""A pytest plugin: TorchRL's own tests, with this package's classes in the place of TorchRL's.

    PYTHONPATH=tests/peers python -m pytest -p swap CHECKOUT/test/llm/test_llm_objectives.py -k TestSFT

It rebinds names in TorchRL's modules before the tests are collected, and gives the tests a tokenizer and small models
made on the spot for those that they would download or build at full size. It changes no test.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from functools import partial
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from torchrl.modules.llm.policies.common import LLMWrapperBase

    import rlhf_pipeline as ours

    # By its path: TorchRL's tests have modules named `conftest` too.
    _spec: Any = importlib.util.spec_from_file_location("peers_conftest", Path(__file__).with_name("conftest.py"))
    tiny = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(tiny)


class RetrieveLogProb(ours.RetrieveLogProb):
    """With TorchRL's default key: that of the model's own log-probs."""

    def __init__(self, model: Any, **options: Any) -> None:
        if isinstance(model, LLMWrapperBase):
            options.setdefault("log_probs_full_key", (model.log_probs_key, "full"))
        super().__init__(model, **options)


class GRPOLoss(ours.GRPOLoss):
    """With TorchRL's default masking strategy."""

    def __init__(self, actor_network: Any = None, **options: Any) -> None:
        super().__init__(actor_network, **{"masking_strategy": "sft", **options})


class CISPOLoss(ours.CISPOLoss):
    """The same."""

    def __init__(self, actor_network: Any = None, **options: Any) -> None:
        super().__init__(actor_network, **{"masking_strategy": "sft", **options})


SWAPPED: dict[str, dict[str, Any]] = {
    "torchrl.objectives.llm.grpo": {
        "MCAdvantage": ours.MCAdvantage,
        "GRPOLoss": GRPOLoss,
        "GRPOLossOutput": ours.GRPOLossOutput,
        "CISPOLoss": CISPOLoss,
        "CISPOLossOutput": ours.GRPOLossOutput,
    },
    "torchrl.envs.llm.transforms.kl": {"RetrieveLogProb": RetrieveLogProb, "KLRewardTransform": ours.KLRewardTransform},
    "torchrl.data.llm.utils": {"RolloutFromModel": ours.RolloutFromModel},
}
EXPORTED_BY = ("torchrl.objectives.llm", "torchrl.envs.llm.transforms", "torchrl.envs.llm", "torchrl.data")

# What the tests build at full size otherwise, 125 million weights each.
OPT = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}

TOKENIZER_ONLY = ("test_retrieve_log_prob_input_modes", "test_retrieve_kl_input_modes")
"""Tests that take no more than a tokenizer from the fixture `vllm_instance`, and are skipped where vLLM is missing."""


def pytest_configure() -> None:
    """Rebind the names; the packages that export them again get them too."""
    for module, names in SWAPPED.items():
        for target in (module, *EXPORTED_BY):
            found = importlib.import_module(target)
            for name, value in names.items():
                if hasattr(found, name):
                    setattr(found, name, value)
    lib: Any = transformers
    lib.AutoTokenizer.from_pretrained = staticmethod(lambda *_, **__: tiny.make_tokenizer())
    lib.AutoModelForCausalLM.from_pretrained = staticmethod(lambda *_, **__: tiny.make_model(tiny.make_tokenizer()))
    lib.OPTConfig = partial(lib.OPTConfig, vocab_size=300, **OPT)
    lib.GPT2Config = partial(lib.GPT2Config, **GPT2)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give the tests that read tokens their tokenizer."""
    for item in items:
        if getattr(item, "originalname", None) in TOKENIZER_ONLY:
            for fixture in item._fixtureinfo.name2fixturedefs.get("vllm_instance", ()):
                fixture.func = lambda: (None, tiny.make_tokenizer())
