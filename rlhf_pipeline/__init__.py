"""The data path of RL post-training: a durable trajectory store, a TorchRL write path and a GRPO learner.

Every name is imported when it is first asked for, so `rlhf-pipeline --help` answers at once and `from rlhf_pipeline
import GRPOLoss` works. `from rlhf_pipeline import *` gives what definitions are made of, plain data without torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not typing's: importing typing takes longer than all else that a command does before it answers
if TYPE_CHECKING:
    from typing import Any

    from rlhf_pipeline.collectors.collector import Collector
    from rlhf_pipeline.config import (
        GRPO,
        Buffer,
        Collect,
        Learn,
        Pipeline,
        PretrainedPolicy,
        Replay,
        Sample,
        TinyPolicy,
        WritePath,
    )
    from rlhf_pipeline.config_text import override
    from rlhf_pipeline.data import keys
    from rlhf_pipeline.data.prompts import CopyDigits, JsonlPrompts, Prompt
    from rlhf_pipeline.data.rewards import final_number, final_number_match, token_match
    from rlhf_pipeline.errors import PipelineError
    from rlhf_pipeline.functional.advantage import group_advantage
    from rlhf_pipeline.functional.kl import kl_k1, kl_k2, kl_k3
    from rlhf_pipeline.interop.torchrl.containers import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens
    from rlhf_pipeline.interop.torchrl.distribution import LogProbDistribution
    from rlhf_pipeline.interop.torchrl.losses import DAPO, CISPOLoss
    from rlhf_pipeline.interop.torchrl.policy import CausalLMPolicy, scratch_policy
    from rlhf_pipeline.interop.torchrl.rollout_from_model import RolloutFromModel
    from rlhf_pipeline.learner.learner import Learner
    from rlhf_pipeline.losses.grpo import GRPOLoss, GRPOLossOutput
    from rlhf_pipeline.replay.buffer import TrajectoryReplayBuffer
    from rlhf_pipeline.replay.storage import TrajectoryStorage
    from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController, ConstantKLController
    from rlhf_pipeline.transforms.kl_reward import KLRewardTransform
    from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
    from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb

__version__ = "0.1.0"

_LIGHT = {
    "GRPO": "rlhf_pipeline.config",
    "Buffer": "rlhf_pipeline.config",
    "Collect": "rlhf_pipeline.config",
    "Learn": "rlhf_pipeline.config",
    "Pipeline": "rlhf_pipeline.config",
    "PretrainedPolicy": "rlhf_pipeline.config",
    "Replay": "rlhf_pipeline.config",
    "Sample": "rlhf_pipeline.config",
    "TinyPolicy": "rlhf_pipeline.config",
    "WritePath": "rlhf_pipeline.config",
    "override": "rlhf_pipeline.config_text",
    "PipelineError": "rlhf_pipeline.errors",
    "CopyDigits": "rlhf_pipeline.data.prompts",
    "JsonlPrompts": "rlhf_pipeline.data.prompts",
    "Prompt": "rlhf_pipeline.data.prompts",
    "final_number": "rlhf_pipeline.data.rewards",
    "final_number_match": "rlhf_pipeline.data.rewards",
    "keys": "rlhf_pipeline.data",
    "token_match": "rlhf_pipeline.data.rewards",
}
"""What definitions are made of, and the modules that define it."""

_HEAVY = {
    "AdaptiveKLController": "rlhf_pipeline.transforms.kl_controllers",
    "CISPOLoss": "rlhf_pipeline.interop.torchrl.losses",
    "CausalLMPolicy": "rlhf_pipeline.interop.torchrl.policy",
    "ChatHistory": "rlhf_pipeline.interop.torchrl.containers",
    "Collector": "rlhf_pipeline.collectors.collector",
    "ConstantKLController": "rlhf_pipeline.transforms.kl_controllers",
    "DAPO": "rlhf_pipeline.interop.torchrl.losses",
    "GRPOLoss": "rlhf_pipeline.losses.grpo",
    "GRPOLossOutput": "rlhf_pipeline.losses.grpo",
    "KLRewardTransform": "rlhf_pipeline.transforms.kl_reward",
    "LLMWrapperBase": "rlhf_pipeline.interop.torchrl.containers",
    "Learner": "rlhf_pipeline.learner.learner",
    "LogProbDistribution": "rlhf_pipeline.interop.torchrl.distribution",
    "LogProbs": "rlhf_pipeline.interop.torchrl.containers",
    "MCAdvantage": "rlhf_pipeline.transforms.mc_advantage",
    "Masks": "rlhf_pipeline.interop.torchrl.containers",
    "RetrieveLogProb": "rlhf_pipeline.transforms.retrieve_log_prob",
    "Text": "rlhf_pipeline.interop.torchrl.containers",
    "Tokens": "rlhf_pipeline.interop.torchrl.containers",
    "RolloutFromModel": "rlhf_pipeline.interop.torchrl.rollout_from_model",
    "TrajectoryReplayBuffer": "rlhf_pipeline.replay.buffer",
    "TrajectoryStorage": "rlhf_pipeline.replay.storage",
    "group_advantage": "rlhf_pipeline.functional.advantage",
    "kl_k1": "rlhf_pipeline.functional.kl",
    "kl_k2": "rlhf_pipeline.functional.kl",
    "kl_k3": "rlhf_pipeline.functional.kl",
    "scratch_policy": "rlhf_pipeline.interop.torchrl.policy",
}
"""Names that need torch, and the modules that define them."""

_ADAPTED = frozenset({"CausalLMPolicy", "Collector", "GRPOLoss", "KLRewardTransform", "RetrieveLogProb"})
"""Names that take a policy, or what an adapter makes one of."""

__all__ = [
    "Buffer",
    "Collect",
    "CopyDigits",
    "GRPO",
    "JsonlPrompts",
    "Learn",
    "Pipeline",
    "PipelineError",
    "PretrainedPolicy",
    "Prompt",
    "Replay",
    "Sample",
    "TinyPolicy",
    "WritePath",
    "final_number",
    "final_number_match",
    "override",
    "token_match",
]
"""What `from rlhf_pipeline import *` gives: what definitions are made of."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for (PEP 562)."""
    import importlib

    module = _LIGHT.get(name) or _HEAVY.get(name)
    if module is None:
        raise AttributeError(f"module 'rlhf_pipeline' has no attribute '{name}'")
    if name in _ADAPTED:
        importlib.import_module("rlhf_pipeline.interop.torchrl")  # so that they take TorchRL's wrappers
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*_LIGHT, *_HEAVY))
