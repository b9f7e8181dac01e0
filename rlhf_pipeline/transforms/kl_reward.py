"""The KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from rlhf_pipeline.data.keys import (
    KL_COEF,
    KL_PENALTY,
    LOG_PROBS,
    REF_LOG_PROBS,
    REWARD,
    ROW_ID,
    TASK_REWARD,
    TOKENS,
    Key,
)
from rlhf_pipeline.data.tensordicts import holds
from rlhf_pipeline.data.trajectories import Flat, Trajectories, last_position, per_token, segment_sum
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError, refuse_unknown
from rlhf_pipeline.functional.kl import kl_figures, kl_k1
from rlhf_pipeline.transforms.base import (
    ColumnTransform,
    as_scorer,
    declare_per_token,
    in_next,
    score,
    scored_positions,
)
from rlhf_pipeline.transforms.kl_controllers import ConstantKLController, KLController


class KLRewardTransform(ColumnTransform):
    """Subtracts the KL to a reference model from the reward of every assistant token.

    `r_t = [t is the last assistant token] * task_reward - coef * k1_t`, with `k1_t = log_prob_t - ref_log_prob_t`
    at the behaviour policy's log-probs: the form whose policy gradient is unbiased. Runs on the write path (as an
    inverse transform) and as a forward transform. A batch with `("next", "kl_penalty")` has been through the transform
    already and passes unchanged, so a sampled batch is not penalised twice.

    Writes, in the form of the batch: the shaped reward and `k1` per token (0 outside the assistant's tokens), the
    coefficient used as `kl_coef`, and the reference log-probs if it computed them. Tokens whose log-prob is not
    finite have no penalty. No autograd graph is kept.

    Passing a `ProbabilisticTensorDictModule` gives the general form for any actor and environment,
    `ActorKLRewardTransform`.

    Source: https://arxiv.org/abs/1909.08593, equation 2; the choice of k1 in the reward:
    https://arxiv.org/abs/2512.21852.

    Args:
        ref_model: the reference; needed only where the batch has no reference log-probs.
        coef: weight of the penalty.
        in_keys: the reward, in `next` unless a full key is given. Per token, or one per trajectory. Where missing,
            `task_reward` is used.
        out_keys: the reward, and optionally the penalty and the reference log-probs.
        actor: the older name of `ref_model`.
        ref_model_factory: a function that returns the reference.
        log_prob_key: behaviour log-probs.
        ref_log_prob_key: reference log-probs, used if present.
        add_to_reward: False leaves the reward as it is and only measures.
        assistant_only: penalise the assistant's tokens only. False takes every token that has a log-prob.
        controller: sets the coefficient, and is updated after every batch of the write path with the KL of each
            trajectory. Overrides `coef`.
        action_key: for the general form; ignored here, where the actions are the token ids.
        tokenizer: no effect, as in TorchRL: token ids are scored as they are.
        padding_side: no effect: the result has the form of the batch.
        requires_grad: for the general form; here the reference is scored without gradient, so True is refused.
        device: where to run the reference; None leaves it where it is.
        **unknown: refused, with a reason for TorchRL's arguments; `use_ray_service=False` is accepted.
        token_budget: padded tokens of one forward pass of the reference.

    Attributes:
        stats: of the last batch: `k1`, `k2`, `k3` (means over the penalised tokens, nats), `kl` (mean over
            trajectories of the sum of k1), `coef`, `tokens`.

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

    on_write_path = True
    """The transform runs on the write path already, so `rb.append_transform(..., invert=True)` changes nothing."""

    def __new__(cls, ref_model: Any = None, *args: Any, actor: Any = None, **kwargs: Any) -> Self:
        """Choose the form registered for this kind of reference, see `register_form`."""
        del args, kwargs
        model = ref_model if ref_model is not None else actor
        found: Any = next((kind for matches, kind in _forms if cls is KLRewardTransform and matches(model)), cls)
        return super().__new__(found)

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
        del action_key, tokenizer, padding_side
        refuse_arguments(KLRewardTransform, unknown)
        if requires_grad:
            raise DefinitionError(
                "requires_grad=True keeps a differentiable copy of an actor, as ActorKLRewardTransform does; the "
                "reference of a language model is scored without gradient, because the penalty is part of the reward. "
                "Leave it out, or put a KL term into the loss with GRPOLoss(kl_to_ref_coeff=...)."
            )
        models = [m for m in (ref_model, actor) if m is not None]
        if len(models) + (ref_model_factory is not None) > 1:
            raise DefinitionError("pass one of ref_model, actor and ref_model_factory, not several.")
        reward_keys = _as_keys(in_keys, [REWARD])
        names = _as_keys(out_keys, reward_keys)
        if len(reward_keys) != 1 or len(names) not in (1, 2, 3):
            raise DefinitionError(f"one reward key and up to three out keys; got {in_keys!r} and {out_keys!r}.")
        names += [KL_PENALTY, ref_log_prob_key][len(names) - 1 :]
        super().__init__(in_keys=[reward_keys[0], log_prob_key], out_keys=names)
        self.reward_key = reward_keys[0]
        self.reward_out_key, self.kl_key, self.ref_out_key = names
        self.log_prob_key = log_prob_key
        self.ref_log_prob_key = ref_log_prob_key
        self.add_to_reward = add_to_reward
        self.assistant_only = assistant_only
        self.controller: KLController = controller or constant_controller(coef)
        self.token_budget = int(token_budget)
        self.device = None if device is None else torch.device(device)
        model = ref_model_factory() if ref_model_factory is not None else (models[0] if models else None)
        # Kept out of the submodules: a checkpoint of the buffer must not carry the reference's weights.
        self.__dict__["ref_model"] = None if model is None else as_scorer(model, "KLRewardTransform")
        if self.device is not None and isinstance(model, torch.nn.Module):
            model.to(self.device)
        self.stats: dict[str, float] = {}

    @property
    def coef(self) -> float:
        """The coefficient for the next batch."""
        return self.controller.coef

    @coef.setter
    def coef(self, value: float) -> None:
        self.controller.load_state_dict({"coef": float(value)})

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
        shaped = self.reward_out_key != self.reward_key and self.add_to_reward
        found = [self.kl_key, *([self.ref_out_key] if self.ref_model is not None else [])]
        return [in_next(key) for key in (*found, *([self.reward_out_key] if shaped else []))]

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Declare the keys added to a step of an environment: reward, penalty and reference log-probs per token."""
        shaped = self.add_to_reward and self.reward_out_key == self.reward_key
        rewards = [in_next(self.reward_key)] if shaped else []
        return declare_per_token(output_spec, self._observed, rewards)

    def is_done(self, td: TensorDictBase) -> bool:
        """Return whether a batch has been through the transform: it has the penalty, or was read from a store."""
        return holds(td, self.kl_key) or (holds(td, ROW_ID) and holds(td, self.ref_log_prob_key))

    @torch.no_grad()
    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """Return the shaped reward, the penalty and its coefficient; nothing for a batch that has them."""
        if self.kl_key in batch:
            return {}
        if ROW_ID in batch and self.ref_log_prob_key in batch:
            return {}  # read from a store, with the reward as the write path shaped it
        log_probs = per_token(batch, self.log_prob_key)
        if log_probs is None or log_probs.lengths is None:
            raise MissingKeyError(
                f"the batch has no behaviour log-probs under {self.log_prob_key!r}; the collector gives them, or "
                "RetrieveLogProb(..., behaviour_model=...)"
            )
        lengths = log_probs.lengths
        mask = scored_positions(batch, log_probs, self.assistant_only)
        out: dict[Key, Flat] = {}
        ref = per_token(batch, self.ref_log_prob_key, log_probs)
        if ref is None:
            ref = self._reference(batch, log_probs, mask, fill=float("nan") if writing else 0.0)
            out[self.ref_out_key] = ref
        lp, lr, valid, k1 = _k1(log_probs.values, ref.values, mask)
        kl = segment_sum(k1, lengths)
        coef = self.controller.coef
        base, shape = self._base(batch, log_probs, mask)
        if self.add_to_reward:
            out[self.reward_out_key] = Flat((base - coef * k1).float().reshape(shape), lengths)
            if TASK_REWARD not in batch:
                out[TASK_REWARD] = Flat(segment_sum(base, lengths).float())
        out[self.kl_key] = Flat(k1.float(), lengths)
        out[KL_COEF] = Flat(torch.full((lengths.numel(),), coef if self.add_to_reward else 0.0))
        self._measure(lp[valid], lr[valid], kl, coef)
        if writing:
            self.controller.update(kl)
        return out

    @torch.no_grad()
    def observe(self, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, lengths: Tensor) -> None:
        """Measure trajectories that were written earlier, and advance the controller as writing them did.

        A resumed run calls this for trajectories in the store, so that the coefficient continues from where it was.

        Args:
            log_probs: behaviour log-probs, flat float32 `[sum T]`, in the order in which they were written.
            ref_log_probs: reference log-probs, in the same form.
            mask: assistant tokens, bool, in the same form.
            lengths: int64 `[n]`.
        """
        lp, lr, valid, k1 = _k1(log_probs, ref_log_probs, mask)
        kl = torch.segment_reduce(k1, "sum", lengths=lengths)
        self._measure(lp[valid], lr[valid], kl, self.coef)
        self.controller.update(kl)

    def _reference(self, batch: Trajectories, like: Flat, mask: Tensor, *, fill: float) -> Flat:
        model: Any = self.ref_model
        if model is None:
            raise MissingKeyError(
                f"the batch has no reference log-probs under {self.ref_log_prob_key!r} and KLRewardTransform has no "
                "model: put RetrieveLogProb(reference) after it in the list, or pass ref_model="
            )
        tokens = per_token(batch, TOKENS, like)
        if tokens is None:
            raise MissingKeyError(f"the batch has no token ids under {TOKENS!r}")
        values = score(model, tokens, mask, token_budget=self.token_budget, fill=fill, device=self.device)
        return Flat(values, like.lengths)

    def _base(self, batch: Trajectories, like: Flat, mask: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return the reward before the penalty, float64 per token, and its original shape."""
        lengths = like.lengths
        if lengths is None:
            raise DataError("log-probs must be ragged or padded, one row per trajectory")
        reward = batch.get(self.reward_key)
        reward = reward if isinstance(reward, Flat) else batch.get(TASK_REWARD)
        if not isinstance(reward, Flat):
            raise MissingKeyError(f"the batch has neither {self.reward_key!r} nor {TASK_REWARD!r}")
        values, total = reward.values.detach().double(), int(lengths.sum())
        if reward.lengths is not None and torch.equal(reward.lengths, lengths) and values.numel() == total:
            return values.reshape(-1), tuple(values.shape)
        if reward.lengths is None and values.ndim >= 2 and values.numel() == total != lengths.numel():
            return values.reshape(-1), (total,)
        if values.numel() != lengths.numel():
            raise DataError(
                f"the reward has {values.numel()} values for {lengths.numel()} trajectories of {total} tokens; it "
                "must be one per trajectory or one per token"
            )
        base = torch.zeros(total, dtype=torch.float64)
        base[last_position(mask, lengths)] = values.reshape(-1)
        return base, (total,)

    def _measure(self, lp: Tensor, lr: Tensor, kl: Tensor, coef: float) -> None:
        self.stats = {**kl_figures(lp, lr), "kl": float(kl.mean()), "coef": coef, "tokens": float(lp.numel())}

    def get_extra_state(self) -> dict[str, Any]:
        """Return the controller's state and the last measurements."""
        return {"controller": dict(self.controller.state_dict()), "stats": dict(self.stats)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned."""
        self.controller.load_state_dict(state["controller"])
        self.stats = dict(state["stats"])


_REASONS = {
    "use_ray_service": "the reference runs where the transform does; to score in another process, write from there.",
    "actor_name": "there is no Ray actor.",
    "detach": "a penalty in the reward has no graph; GRPOLoss(kl_to_ref_coeff=...) puts a KL term into the loss.",
}
_HARMLESS = {"use_ray_service": (False,)}


def refuse_arguments(kind: type, unknown: dict[str, Any]) -> None:
    """Refuse arguments that a KL transform does not take; TorchRL's `use_ray_service=False` is allowed."""
    known = set(kind.__init__.__annotations__) - {"unknown", "return"}
    refuse_unknown("KLRewardTransform", unknown, known, _REASONS, _HARMLESS)


_forms: list[tuple[Callable[[object], bool], Any]] = []


def register_form(matches: Callable[[object], bool], kind: type[KLRewardTransform]) -> None:
    """Make `KLRewardTransform(model, ...)` construct a subclass for models of another kind."""
    _forms.append((matches, kind))


def constant_controller(coef: Any) -> KLController:
    """Return a controller for a plain coefficient.

    Raises:
        DefinitionError: the coefficient is a controller itself.
    """
    if isinstance(coef, KLController):
        raise DefinitionError(f"coef is a {type(coef).__name__}; pass controller=.")
    return ConstantKLController(kl_coef=float(coef))


def _k1(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both log-probs in float64, the mask of positions where both are finite, and k1 (0 elsewhere)."""
    lp, lr = log_probs.detach().double(), ref_log_probs.detach().double()
    k1 = kl_k1(lp, lr)
    valid = mask & k1.isfinite()  # finite where both log-probs are
    return lp, lr, valid, torch.where(valid, k1, 0.0)


def _as_keys(keys: Key | Sequence[Key] | None, default: list[Key]) -> list[Key]:
    """Return a list of full keys; a plain name means a key in `next`."""
    if keys is None:
        return list(default)
    one = isinstance(keys, str) or (isinstance(keys, tuple) and keys[:1] == ("next",))
    out: list[Key] = []
    for key in [cast(Key, keys)] if one else cast("Sequence[Key]", keys):
        if key == TASK_REWARD or (isinstance(key, tuple) and key[0] == "next"):
            out.append(key)
        else:
            out.append(("next", key) if isinstance(key, str) else ("next", *key))
    return out
