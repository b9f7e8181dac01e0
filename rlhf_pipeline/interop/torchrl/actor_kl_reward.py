"""The KL penalty for any probabilistic actor and environment, without tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any, cast

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform
from torchrl.modules.llm.policies.common import LLMWrapperBase

from rlhf_pipeline.data.keys import Key
from rlhf_pipeline.data.trajectories import Flat, Trajectories
from rlhf_pipeline.errors import DefinitionError, MissingKeyError
from rlhf_pipeline.transforms.kl_controllers import KLController
from rlhf_pipeline.transforms.kl_reward import KLRewardTransform, constant_controller, refuse_arguments


def is_actor(model: object) -> bool:
    """Return whether a model is a probabilistic TensorDict module, rather than a policy that scores tokens."""
    if callable(getattr(model, "log_probs", None)) or isinstance(model, LLMWrapperBase):
        return False
    return isinstance(model, (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)) or (
        isinstance(model, nn.Module) and callable(getattr(model, "get_dist", None)) and hasattr(model, "in_keys")
    )


class ActorKLRewardTransform(KLRewardTransform):
    """`reward - coef * (log_prob - log_prob of a frozen copy of the actor)` at every step of an environment.

    `KLRewardTransform(actor, ...)` makes this class if the actor is a `ProbabilisticTensorDictModule`. The actor is
    copied when the transform is made; later changes of its parameters do not reach the copy. Works as a transform of an
    environment, as a forward transform on a rollout, and on samples of a replay buffer; on the write path, batches pass
    unchanged.

    Source: https://arxiv.org/abs/1909.08593, equation 2.

    Args:
        ref_model: the actor, with `get_dist`.
        coef: weight of the penalty.
        in_keys: the reward, in `next`.
        out_keys: key of the new reward, in `next`; a second name receives the penalty.
        actor: the older name of `ref_model`.
        requires_grad: True makes the copy's parameters require gradients and keeps the graph.
        log_prob_key: log-prob of the action; the actor's own key when None.
        action_key: the action; the environment's, or the actor's first output, when None.
        device: where the copy runs; None leaves it where the actor is.
        add_to_reward: False leaves the reward as it is and only writes the penalty.
        controller: sets the coefficient; it is not updated here.
        **unknown: refused, with a reason for TorchRL's arguments.

    Raises:
        DefinitionError: if no actor or too many keys are given.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule as Prob
    >>> from tensordict.nn import ProbabilisticTensorDictSequential as Seq, TensorDictModule as Mod
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), NormalParamExtractor())
    >>> actor = Seq(
    ...     Mod(net, in_keys=["obs"], out_keys=["loc", "scale"]),
    ...     Prob(["loc", "scale"], ["action"], distribution_class=torch.distributions.Normal, return_log_prob=True),
    ... )
    >>> td = actor(TensorDict(obs=torch.zeros(4, 3), batch_size=[4]))
    >>> td["next", "reward"] = torch.ones(4, 1)
    >>> transform = KLRewardTransform(actor, coef=0.1)
    >>> bool((transform(td)["next", "reward"] == 1).all())  # the same parameters: no penalty
    True
    """

    def __init__(
        self,
        ref_model: Any = None,
        coef: float | Tensor = 1.0,
        in_keys: str | Sequence[Any] | None = None,
        out_keys: str | Sequence[Any] | None = None,
        requires_grad: bool = False,
        *,
        actor: Any = None,
        log_prob_key: Key | None = None,
        action_key: Key | None = None,
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        controller: KLController | None = None,
        **unknown: Any,
    ) -> None:
        refuse_arguments(ActorKLRewardTransform, unknown)
        if not isinstance(requires_grad, bool):
            raise DefinitionError(
                f"the fifth argument of the actor form is requires_grad, True or False, not {requires_grad!r}. Pass "
                "log_prob_key= and those after it by name."
            )
        model = ref_model if ref_model is not None else actor
        if not is_actor(model) or (ref_model is not None and actor is not None):
            raise DefinitionError("ActorKLRewardTransform needs one actor with get_dist, as ref_model or as actor.")
        reward_keys = ["reward"] if in_keys is None else _listed(in_keys)
        names = list(reward_keys) if out_keys is None else _listed(out_keys)
        if len(reward_keys) != 1 or len(names) not in (1, 2):
            raise DefinitionError(f"one reward key and one or two out keys; got {in_keys!r} and {out_keys!r}.")
        Transform.__init__(self, in_keys=[*reward_keys, *model.in_keys], out_keys=names)
        self.reward_key = unravel_key(reward_keys[0])
        self.reward_out_key = unravel_key(names[0])
        self.kl_key = unravel_key(names[1]) if len(names) == 2 else None
        frozen = deepcopy(model)
        self.device = None if device is None else torch.device(device)
        if self.device is not None:
            frozen.to(self.device)
        for parameter in frozen.parameters():
            parameter.requires_grad_(requires_grad)
        self.frozen_actor = frozen
        self.requires_grad = requires_grad
        self.action_key = action_key
        self.log_prob_key = log_prob_key if log_prob_key is not None else _log_prob_key(model)
        self.add_to_reward = add_to_reward
        self.controller = controller or constant_controller(coef)
        self.stats = {}

    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """Return no columns: on the write path the steps have been through the environment already."""
        del batch, writing
        return {}

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Shape the reward of steps that have `next`.

        Args:
            tensordict: steps with the actor's inputs, the action, its log-prob, and the reward in `next`.

        Returns:
            The same TensorDict, with the reward set in `next`.
        """
        tensordict.set("next", self._step(tensordict, tensordict.get("next")))
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get(self._action(), None)
        if action is None:
            raise MissingKeyError(f"the step has no action under {self._action()!r}; pass action_key=")
        log_prob = tensordict.get(self.log_prob_key, None)
        if log_prob is None:
            raise MissingKeyError(
                f"the step has no log-prob under {self.log_prob_key!r}; build the actor with return_log_prob=True"
            )
        with contextlib.nullcontext() if self.requires_grad else torch.no_grad():
            inputs = tensordict.clone(recurse=False) if self.device is None else tensordict.to(self.device)
            dist = self.frozen_actor.get_dist(inputs)
            reference = dist.log_prob(action if self.device is None else action.to(self.device)).to(log_prob.device)
            reward = next_tensordict.get(self.reward_key)
            kl = (log_prob - reference).reshape(reward.shape)
            shaped = reward - self.coef * kl if self.add_to_reward else reward
        out = next_tensordict.clone(recurse=False)
        out.set(self.reward_out_key, shaped)
        if self.kl_key is not None:
            out.set(self.kl_key, kl)
        self.stats = {"k1": float(kl.detach().mean()), "coef": self.coef}
        return out

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        parent = self.parent
        if parent is not None:
            for key in (self.reward_out_key, self.kl_key):
                if key is not None and key not in parent.reward_keys:
                    tensordict_reset.set(key, parent.reward_spec.zero())
        return tensordict_reset

    def _action(self) -> Any:
        if self.action_key is None:
            parent = self.parent
            keys = parent.action_keys if parent is not None else self.frozen_actor.out_keys
            outputs = [k for k in keys if k in ("action", ("action",))] or _sampled(self.frozen_actor) or list(keys)
            if len(outputs) != 1:
                raise DefinitionError(f"which of {outputs} is the action? Pass action_key=.")
            self.action_key = outputs[0]
        return self.action_key

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Declare the keys added to the environment: the reward under another name, and the penalty."""
        parent = self.parent
        if parent is None:
            return output_spec
        reward_spec = output_spec["full_reward_spec"]
        source = cast(Any, reward_spec)[self.reward_key]
        spec = Unbounded(shape=source.shape, device=source.device, dtype=source.dtype)
        if self.reward_out_key == self.reward_key:
            reward_spec[self.reward_key] = spec
        else:
            output_spec["full_observation_spec"][self.reward_out_key] = spec
        if self.kl_key is not None:
            output_spec["full_observation_spec"][self.kl_key] = spec.clone()
        return output_spec


def _listed(keys: Any) -> list[Any]:
    return [keys] if isinstance(keys, str) else list(keys)


def _log_prob_key(model: Any) -> Any:
    keys = list(getattr(model, "log_prob_keys", None) or [])
    return keys[0] if len(keys) == 1 else getattr(model, "log_prob_key", "sample_log_prob")


def _sampled(model: nn.Module) -> list[Any]:
    modules = [m for m in model.modules() if isinstance(m, ProbabilisticTensorDictModule)]
    names = [key for m in modules for key in m.out_keys]
    return [key for key in names if key not in [k for m in modules for k in (getattr(m, "log_prob_keys", None) or [])]]
