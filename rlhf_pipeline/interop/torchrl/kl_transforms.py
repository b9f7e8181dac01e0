"""The KL penalty with TorchRL's arguments: for language models, and for any probabilistic actor without tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Self, cast

import torch
from tensordict import TensorDict, TensorDictBase, TensorDictParams, unravel_key
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform
from torchrl.modules.llm.policies.common import LLMWrapperBase

from rlhf_pipeline.data.keys import KL_PENALTY, LOG_PROBS, REF_LOG_PROBS, REWARD, TASK_REWARD, Key
from rlhf_pipeline.data.trajectories import Flat, Trajectories
from rlhf_pipeline.errors import DefinitionError, MissingKeyError, refuse_unknown
from rlhf_pipeline.interop.torchrl.flat_responses import complete_rows, is_flat, with_responses
from rlhf_pipeline.transforms.base import declare_per_token, in_next
from rlhf_pipeline.transforms.kl_controllers import KLController
from rlhf_pipeline.transforms.kl_reward import KLKeys, KLReward, constant_controller


def is_actor(model: object) -> bool:
    """Return whether a model is a probabilistic TensorDict module, rather than a policy that scores tokens."""
    if callable(getattr(model, "log_probs", None)) or isinstance(model, LLMWrapperBase):
        return False
    return isinstance(model, (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)) or (
        isinstance(model, nn.Module) and callable(getattr(model, "get_dist", None)) and hasattr(model, "in_keys")
    )


class KLRewardTransform(KLReward):
    """`KLReward` with TorchRL's names and arguments, also as a forward transform and in an environment.

    The result has the form of the batch.

    Passing a `ProbabilisticTensorDictModule` gives the general form for any actor and environment,
    `ActorKLRewardTransform`.

    Args:
        ref_model: the reference; needed only where the batch has no reference log-probs.
        coef: weight of the penalty.
        in_keys: the reward, in `next` unless a full key is given. Per token, or one per trajectory. Where missing,
            `task_reward` is used.
        out_keys: the reward, and optionally the penalty and the reference log-probs.
        actor: the older name of `ref_model`.
        ref_model_factory: a function that returns the reference.
        log_prob_key: behaviour log-probs. A flat key, such as `"log_probs"`, also reads batches of older versions of
            TorchRL: the response's log-probs, with `tokens`, `tokens_response`; the result is the response's as well.
        ref_log_prob_key: reference log-probs, used if present.
        add_to_reward: False leaves the reward unchanged and only measures the penalty.
        assistant_only: penalise the assistant's tokens only. False takes every token that has a log-prob.
        controller: sets the coefficient, and is updated after every batch of the write path with the KL of each
            trajectory. Overrides `coef`.
        action_key: for the general form; nothing reads it here, where the actions are the token ids.
        tokenizer: no effect, as in TorchRL: token ids are scored unchanged.
        padding_side: no effect: the result has the form of the batch.
        requires_grad: for the general form; here the reference is scored without gradient, so True is rejected.
        device: where to run the reference; None keeps its device.
        **unknown: rejected, with a reason for TorchRL's arguments; `use_ray_service=False` is accepted.
        token_budget: padded tokens of one forward pass of the reference.

    Raises:
        DefinitionError: if the arguments contradict each other.

    >>> import torch
    >>> from tensordict import TensorDict, lazy_stack
    >>> nan = float("nan")
    >>> row = TensorDict({
    ...     "tokens": {"full": torch.tensor([5, 6, 7])},
    ...     "masks": {"all_assistant_mask": torch.tensor([False, True, True])},
    ...     "log_probs": {"full": torch.tensor([nan, -1.0, -2.0])},
    ...     "next": {"ref_log_probs": {"full": torch.tensor([nan, -1.5, -1.0])}},
    ...     "task_reward": torch.tensor(1.0),
    ... })
    >>> transform = KLRewardTransform(coef=0.5)
    >>> transform.inv(lazy_stack([row]))[0]["next", "reward"]
    tensor([ 0.0000, -0.2500,  1.5000])
    >>> round(transform.stats["k1"], 6)
    -0.25
    """

    def __new__(cls, ref_model: Any = None, *args: Any, actor: Any = None, **kwargs: Any) -> Self:
        """Choose the form for this kind of reference."""
        del args, kwargs
        of_actor = cls is KLRewardTransform and is_actor(ref_model if ref_model is not None else actor)
        transform_class: Any = ActorKLRewardTransform if of_actor else cls
        return super().__new__(transform_class)

    def __init__(
        self,
        ref_model: Any = None,
        coef: float | Tensor = 1.0,
        in_keys: Key | Sequence[Key] | None = None,
        out_keys: Key | Sequence[Key] | None = None,
        log_prob_key: Key = LOG_PROBS,
        action_key: Key | None = None,
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        *,
        actor: Any = None,
        ref_model_factory: Callable[[], Any] | None = None,
        ref_log_prob_key: Key = REF_LOG_PROBS,
        assistant_only: bool = True,
        controller: KLController | None = None,
        requires_grad: bool = False,
        tokenizer: Any = None,
        padding_side: str = "left",
        token_budget: int = 16_384,
        **unknown: Any,
    ) -> None:
        del tokenizer, padding_side
        refuse_arguments(KLRewardTransform, unknown)
        if requires_grad:
            raise DefinitionError(
                "requires_grad=True keeps a differentiable copy of an actor, as in ActorKLRewardTransform, but a "
                "reference model scores tokens without gradients, because the penalty is part of the "
                "reward. Omit requires_grad, or add a KL term to the loss with GRPOLoss(kl_to_ref_coeff=...)."
            )
        models = [m for m in (ref_model, actor) if m is not None]
        if len(models) + (ref_model_factory is not None) > 1:
            raise DefinitionError("pass only one of ref_model, actor and ref_model_factory.")
        reward_keys = _as_keys(in_keys, [REWARD])
        names = _as_keys(out_keys, reward_keys)
        if len(reward_keys) != 1 or len(names) not in (1, 2, 3):
            raise DefinitionError(f"pass one reward key and up to three out keys; got {in_keys!r} and {out_keys!r}.")
        names += [KL_PENALTY, ref_log_prob_key][len(names) - 1 :]
        if ref_model_factory is not None:
            models = [ref_model_factory()]
        super().__init__(
            coef,
            controller=controller,
            reference=models[0] if models else None,
            keys=KLKeys(
                reward=reward_keys[0],
                shaped=names[0],
                penalty=names[1],
                log_probs=log_prob_key,
                ref_log_probs=ref_log_prob_key,
                scored=names[2],
            ),
            add_to_reward=add_to_reward,
            assistant_only=assistant_only,
            token_budget=token_budget,
            device=device,
        )
        self._action_key = action_key

    def _fill(self, td: TensorDictBase, *, writing: bool) -> TensorDictBase:
        log_probs, keys = self.keys.log_probs, self.keys
        if not isinstance(log_probs, str) or not is_flat(td, log_probs):
            return super()._fill(td, writing=writing)
        whole = super()._fill(complete_rows(td, log_probs, (keys.reward, keys.ref_log_probs)), writing=writing)
        computed = [keys.penalty, keys.scored, *([keys.shaped] if self.add_to_reward else [])]
        return with_responses(td, whole, log_probs, computed)

    @property
    def action_key(self) -> Key | None:
        """The key of the action: as given, or the environment's only one."""
        if self._action_key is None and self.parent is not None and len(self.parent.action_keys) == 1:
            self._action_key = cast(Key, self.parent.action_keys[0])
        return self._action_key

    @action_key.setter
    def action_key(self, value: Key | None) -> None:
        self._action_key = value

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        whole = tensordict.clone(recurse=False).set("next", next_tensordict)
        return self._fill(whole, writing=False).get("next")

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        for key in self._observed:
            if tensordict_reset.get(key, None) is None:
                tensordict_reset.set(key, torch.zeros(*tensordict_reset.batch_size, 1))
        return tensordict_reset

    @property
    def _observed(self) -> list[Key]:
        """Return the keys, besides the reward, that the transform adds to a step of an environment."""
        shaped = self.keys.shaped != self.keys.reward and self.add_to_reward
        observed = [self.keys.penalty, *([self.keys.scored] if self.ref_model is not None else [])]
        return [in_next(key) for key in (*observed, *([self.keys.shaped] if shaped else []))]

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Declare the keys added to a step of an environment: reward, penalty and reference log-probs per token."""
        shaped = self.add_to_reward and self.keys.shaped == self.keys.reward
        rewards = [in_next(self.keys.reward)] if shaped else []
        return declare_per_token(output_spec, self._observed, rewards)


class ActorKLRewardTransform(KLRewardTransform):
    """`reward - coef * (log_prob - log_prob of a frozen copy of the actor)` at every step of an environment.

    `KLRewardTransform(actor, ...)` makes this class if the actor is a `ProbabilisticTensorDictModule`. The actor is
    copied when the transform is made; later changes of its parameters do not reach the copy. Works as a transform of an
    environment, as a forward transform on a rollout, and on samples of a replay buffer; on the write path, batches pass
    unchanged. In an environment, an action without a log-prob, such as a random one of `check_env_specs`, gets that of
    the actor at this moment; elsewhere a missing log-prob is an error.

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
        device: where the copy runs; None keeps it on the actor's device.
        add_to_reward: False leaves the reward unchanged and only writes the penalty.
        controller: sets the coefficient; it is not updated here.
        **unknown: rejected, with a reason for TorchRL's arguments.

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
                "the fifth argument of ActorKLRewardTransform is requires_grad, which must be True or "
                f"False; got {requires_grad!r}. Pass log_prob_key= and later arguments by name."
            )
        model = ref_model if ref_model is not None else actor
        if not is_actor(model) or (ref_model is not None and actor is not None):
            raise DefinitionError(
                "ActorKLRewardTransform needs exactly one actor that has get_dist, passed as ref_model or actor."
            )
        reward_keys = ["reward"] if in_keys is None else _listed(in_keys)
        names = list(reward_keys) if out_keys is None else _listed(out_keys)
        if len(reward_keys) != 1 or len(names) not in (1, 2):
            raise DefinitionError(f"pass one reward key and one or two out keys; got {in_keys!r} and {out_keys!r}.")
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
        self._action_key = action_key
        self.log_prob_key = log_prob_key if log_prob_key is not None else _log_prob_key(model)
        self.add_to_reward = add_to_reward
        self.controller = controller or constant_controller(coef)
        self.hold_coef(coef)
        self.__dict__["actor"] = model
        self.stats = {}

    @property
    def functional_actor(self) -> nn.Module:
        """The frozen copy of the actor; `frozen_params.to_module(functional_actor)` changes nothing."""
        return self.frozen_actor

    @property
    def frozen_params(self) -> TensorDictParams:
        """The parameters and buffers of the frozen copy."""
        return TensorDictParams(TensorDict.from_module(self.frozen_actor), no_convert=True)

    @property
    def sample_log_prob_key(self) -> Key:
        """The key of the log-prob of the action."""
        return self.log_prob_key

    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """Return no columns: on the write path the environment has already processed the steps."""
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
            raise MissingKeyError(f"the step has no action under {self._action()!r}; specify its key with action_key")
        log_prob = tensordict.get(self.log_prob_key, None)
        if log_prob is None and self.parent is None:
            raise MissingKeyError(
                f"the step has no log-prob under {self.log_prob_key!r}; build the actor with return_log_prob=True"
            )
        with contextlib.nullcontext() if self.requires_grad else torch.no_grad():
            if log_prob is None:
                # In an environment the actor is unchanged since the action was taken; `check_env_specs` takes random
                # actions, which no actor scored.
                log_prob = self.__dict__["actor"].get_dist(tensordict.clone(recurse=False)).log_prob(action)
            inputs = tensordict.clone(recurse=False) if self.device is None else tensordict.to(self.device)
            dist = self.frozen_actor.get_dist(inputs)
            reference = dist.log_prob(action if self.device is None else action.to(self.device)).to(log_prob.device)
            reward = next_tensordict.get(self.reward_key)
            kl = (log_prob - reference).reshape(reward.shape)
            shaped = reward - self.controller.coef * kl if self.add_to_reward else reward
        out = next_tensordict.clone(recurse=False)
        out.set(self.reward_out_key, shaped)
        if self.kl_key is not None:
            out.set(self.kl_key, kl)
        self.stats = {"k1": float(kl.detach().mean()), "coef": self.controller.coef}
        return out

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        parent = self.parent
        if parent is not None:
            for key in (self.reward_out_key, self.kl_key):
                if key is not None and key not in parent.reward_keys:
                    tensordict_reset.set(key, parent.reward_spec.zero())
        return tensordict_reset

    def _action(self) -> Any:
        if self._action_key is None:
            parent = self.parent
            keys = parent.action_keys if parent is not None else self.frozen_actor.out_keys
            outputs = [k for k in keys if k in ("action", ("action",))] or _sampled(self.frozen_actor) or list(keys)
            if len(outputs) != 1:
                raise DefinitionError(f"the action could be any of {outputs}; specify its key with action_key.")
            self._action_key = outputs[0]
        return self._action_key

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


_REASONS = {
    "use_ray_service": (
        "the reference runs in the process of the transform; to score in another process, write from that process."
    ),
    "actor_name": "there is no Ray actor.",
    "detach": "a penalty in the reward has no graph; GRPOLoss(kl_to_ref_coeff=...) adds a KL term to the loss.",
}
_HARMLESS = {"use_ray_service": (False,)}


def refuse_arguments(kind: type, unknown: dict[str, Any]) -> None:
    """Reject arguments that a KL transform does not accept; TorchRL's `use_ray_service=False` is allowed."""
    arguments = set(kind.__init__.__annotations__) - {"unknown", "return"}
    refuse_unknown("KLRewardTransform", unknown, arguments, _REASONS, _HARMLESS)


def _as_keys(keys: Key | Sequence[Key] | None, default: list[Key]) -> list[Key]:
    """Return a list of full keys; a plain name means a key in `next`."""
    if keys is None:
        return list(default)
    is_single = isinstance(keys, str) or (isinstance(keys, tuple) and keys[:1] == ("next",))
    out: list[Key] = []
    for key in [cast(Key, keys)] if is_single else cast("Sequence[Key]", keys):
        if key == TASK_REWARD or (isinstance(key, tuple) and key[0] == "next"):
            out.append(key)
        else:
            out.append(("next", key) if isinstance(key, str) else ("next", *key))
    return out
