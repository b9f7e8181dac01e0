"""Interfaces that TorchRL documents. Importing this package makes the core accept TorchRL's wrappers and actors.

- `forms`: padded, jagged and dense TensorDicts on the write path, and TorchRL's `[B, T]`.
- `policy`: `CausalLMPolicy` with TorchRL's arguments, over TensorDicts; `containers` and `distribution` are its base.
- `wrappers`: TorchRL's `TransformersWrapper` and `vLLMWrapper` as policies.
- `chat_trajectories`: turns the steps of its `LLMCollector` and `ChatEnv` into rows of the write path.
- `chat_environment`: a `ChatEnv` as an environment of a definition.
- `kl_transforms`: the KL penalty with TorchRL's arguments, also for any probabilistic actor.
- `rollout_from_model`, `losses`: `RolloutFromModel`, `CISPOLoss` and `DAPO`.
"""

from __future__ import annotations

from rlhf_pipeline.interop.torchrl.chat_environment import ChatEnvironment
from rlhf_pipeline.interop.torchrl.chat_trajectories import ChatTrajectories
from rlhf_pipeline.interop.torchrl.kl_transforms import ActorKLRewardTransform
from rlhf_pipeline.interop.torchrl.wrappers import EnginePolicy, WrapperAdapter, as_policy
from rlhf_pipeline.policies.adapters import register

__all__ = ["ActorKLRewardTransform", "ChatEnvironment", "ChatTrajectories", "EnginePolicy", "as_policy"]

register(WrapperAdapter())
