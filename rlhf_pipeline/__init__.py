"""The data path of RL post-training: a durable trajectory store, a TorchRL write path and a GRPO learner.

Names are imported on first use, so `rlhf-pipeline --help` answers at once and `from rlhf_pipeline import GRPOLoss`
works. `from rlhf_pipeline import *` imports the parts of definitions, plain data without torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would take longer than everything else that a command does before it answers
if TYPE_CHECKING:
    from typing import Any

    from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
    from rlhf_pipeline.buffer.storage import TrajectoryStorage
    from rlhf_pipeline.collectors.collector import Collector
    from rlhf_pipeline.config import (
        DPPO,
        GRPO,
        VESPO,
        Buffer,
        Collect,
        Evaluate,
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
    from rlhf_pipeline.data.prompts import CopyDigits, Curriculum, Mix, Prompt, Prompts
    from rlhf_pipeline.data.rewards import (
        LeftOut,
        Matches,
        Reward,
        SoftOverlong,
        exact_match,
        final_number,
        final_number_match,
        mask_truncated,
        math_verify_match,
        token_match,
    )
    from rlhf_pipeline.environments.agent_program import AgentProgram
    from rlhf_pipeline.environments.environment import Environment, Step, Turn
    from rlhf_pipeline.environments.games import FrozenLake, LakeMaps, Sokoban, Warehouses
    from rlhf_pipeline.environments.tools import Tools
    from rlhf_pipeline.errors import PipelineError
    from rlhf_pipeline.functional.advantage import group_advantage
    from rlhf_pipeline.functional.kl import kl_k1, kl_k2, kl_k3
    from rlhf_pipeline.interop.torchrl.containers import ChatHistory, LLMWrapperBase, LogProbs, Masks, Text, Tokens
    from rlhf_pipeline.interop.torchrl.distribution import LogProbDistribution
    from rlhf_pipeline.interop.torchrl.kl_transforms import KLRewardTransform
    from rlhf_pipeline.interop.torchrl.losses import DAPO, CISPOLoss
    from rlhf_pipeline.interop.torchrl.policy import CausalLMPolicy, scratch_policy
    from rlhf_pipeline.interop.torchrl.rollout_from_model import RolloutFromModel
    from rlhf_pipeline.learner.learner import Learner
    from rlhf_pipeline.losses.grpo import GRPOLoss, GRPOLossOutput
    from rlhf_pipeline.transforms.kl_controllers import AdaptiveKLController, ConstantKLController
    from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
    from rlhf_pipeline.transforms.retrieve_log_prob import RetrieveLogProb

__version__ = "0.1.0"

_NAMES = {
    "config": "Buffer Collect DPPO Evaluate GRPO Learn Pipeline PretrainedPolicy Replay Sample TinyPolicy VESPO "
    "WritePath",
    "config_text": "override",
    "data": "keys",
    "data.prompts": "CopyDigits Curriculum Mix Prompt Prompts",
    "data.rewards": "LeftOut Matches Reward SoftOverlong exact_match final_number final_number_match mask_truncated "
    "math_verify_match token_match",
    "environments.games": "FrozenLake LakeMaps Sokoban Warehouses",
    "environments.agent_program": "AgentProgram",
    "environments.environment": "Environment Step Turn",
    "environments.tools": "Tools",
    "errors": "PipelineError",
    "collectors.collector": "Collector",
    "functional.advantage": "group_advantage",
    "functional.kl": "kl_k1 kl_k2 kl_k3",
    "interop.torchrl.containers": "ChatHistory LLMWrapperBase LogProbs Masks Text Tokens",
    "interop.torchrl.distribution": "LogProbDistribution",
    "interop.torchrl.kl_transforms": "KLRewardTransform",
    "interop.torchrl.losses": "CISPOLoss DAPO",
    "interop.torchrl.policy": "CausalLMPolicy scratch_policy",
    "interop.torchrl.rollout_from_model": "RolloutFromModel",
    "learner.learner": "Learner",
    "losses.grpo": "GRPOLoss GRPOLossOutput",
    "buffer.buffer": "TrajectoryReplayBuffer",
    "buffer.storage": "TrajectoryStorage",
    "transforms.kl_controllers": "AdaptiveKLController ConstantKLController",
    "transforms.mc_advantage": "MCAdvantage",
    "transforms.retrieve_log_prob": "RetrieveLogProb",
}
"""The public names by module: first the parts of definitions, then names that need torch."""

_MODULE_OF = {name: f"rlhf_pipeline.{module}" for module, names in _NAMES.items() for name in names.split()}

_ADAPTED = {"CausalLMPolicy", "Collector", "GRPOLoss", "RetrieveLogProb"}
_ADAPTED |= {"MCAdvantage", "TrajectoryReplayBuffer", "TrajectoryStorage"}
"""Names that accept a policy, a model that an adapter converts to a policy, or TensorDicts in TorchRL's formats."""

__all__ = [
    "AgentProgram",
    "Buffer",
    "Collect",
    "CopyDigits",
    "Curriculum",
    "DPPO",
    "Environment",
    "Evaluate",
    "FrozenLake",
    "GRPO",
    "LakeMaps",
    "Learn",
    "LeftOut",
    "Matches",
    "Mix",
    "Pipeline",
    "PipelineError",
    "PretrainedPolicy",
    "Prompt",
    "Prompts",
    "Replay",
    "Reward",
    "Sample",
    "SoftOverlong",
    "Sokoban",
    "Step",
    "TinyPolicy",
    "Tools",
    "Turn",
    "VESPO",
    "Warehouses",
    "WritePath",
    "exact_match",
    "final_number",
    "final_number_match",
    "mask_truncated",
    "math_verify_match",
    "override",
    "token_match",
]
"""The names that `from rlhf_pipeline import *` imports: the parts of definitions."""


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562)."""
    import importlib

    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'rlhf_pipeline' has no attribute '{name}'")
    if name in _ADAPTED:
        importlib.import_module("rlhf_pipeline.interop.torchrl")  # so that these names accept what is TorchRL's
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_MODULE_OF)
