"""The KL penalty in the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torch import Tensor

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
from rlhf_pipeline.data.tensordicts import holds, with_full_log_probs
from rlhf_pipeline.data.trajectories import Flat, Trajectories, last_position, per_token, segment_sum
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.functional.kl import kl_figures, kl_k1
from rlhf_pipeline.transforms.base import (
    ColumnTransform,
    as_scorer,
    outcomes,
    score,
    scored_positions,
)
from rlhf_pipeline.transforms.kl_controllers import ConstantKLController, KLController


@dataclass(frozen=True, kw_only=True, slots=True)
class KLKeys:
    """The keys of a KL penalty in the reward."""

    reward: Key = REWARD
    shaped: Key = REWARD
    penalty: Key = KL_PENALTY
    log_probs: Key = LOG_PROBS
    ref_log_probs: Key = REF_LOG_PROBS
    scored: Key = REF_LOG_PROBS


class KLReward(ColumnTransform):
    """Subtracts the KL to a reference model from the reward of every assistant token.

    `r_t = [t is the last assistant token] * task_reward - coef * k1_t`, with `k1_t = log_prob_t - ref_log_prob_t`
    at the behaviour policy's log-probs: the form whose policy gradient is unbiased. A batch with
    `("next", "kl_penalty")` has been through the transform already and passes unchanged, so a sampled batch is not
    penalised twice.

    Writes the shaped reward and `k1` per token (0 outside the assistant's tokens), the coefficient used as `kl_coef`,
    and the reference log-probs if it computed them. Tokens whose log-prob is not finite have no penalty. No autograd
    graph is kept.

    Source: https://arxiv.org/abs/1909.08593, equation 2; the choice of k1 in the reward:
    https://arxiv.org/abs/2512.21852.

    Args:
        coef: weight of the penalty.
        controller: sets the coefficient, and is updated after every batch of the write path with the KL of each
            trajectory. Overrides `coef`.
        reference: needed only where the batch has no reference log-probs.
        keys: what is read and written.
        add_to_reward: False leaves the reward unchanged and only measures the penalty.
        assistant_only: penalise the assistant's tokens only. False takes every token that has a log-prob.
        token_budget: padded tokens of one forward pass of the reference.
        device: where to run the reference; None keeps its device.

    Attributes:
        stats: of the last batch: `k1`, `k2`, `k3` (means over the penalised tokens, nats), `kl` (mean over
            trajectories of the sum of k1), `coef`, `tokens`.

    Raises:
        DefinitionError: `coef` is a controller, or the reference cannot score tokens.
    """

    DEFAULT_IN_KEYS: ClassVar[list[str]] = ["reward"]
    """The default key of the reward inside `next`."""
    on_write_path = True
    """The transform runs on the write path already, so `rb.append_transform(..., invert=True)` has no effect."""

    def __init__(
        self,
        coef: float | Tensor = 1.0,
        *,
        controller: KLController | None = None,
        reference: Any = None,
        keys: KLKeys | None = None,
        add_to_reward: bool = True,
        assistant_only: bool = True,
        token_budget: int = 16_384,
        device: torch.device | str | None = None,
    ) -> None:
        names = KLKeys() if keys is None else keys
        super().__init__(
            in_keys=[names.reward, names.log_probs],
            out_keys=[names.shaped, names.penalty, names.scored],
        )
        self.keys = names
        self.add_to_reward = add_to_reward
        self.assistant_only = assistant_only
        self.controller: KLController = controller or constant_controller(coef)
        self.hold_coef(coef)
        self.token_budget = int(token_budget)
        self.device = None if device is None else torch.device(device)
        # Kept out of the submodules: a checkpoint of the buffer must not carry the reference's weights.
        self.__dict__["actor"] = reference
        self.__dict__["ref_model"] = None if reference is None else as_scorer(reference, "KLRewardTransform")
        if self.device is not None and isinstance(reference, torch.nn.Module):
            reference.to(self.device)
        self.stats: dict[str, float] = {}

    def hold_coef(self, coef: Any) -> None:
        """Register the buffer of the coefficient, in the dtype and on the device of `coef`."""
        value = coef if isinstance(coef, Tensor) else torch.tensor(0.0)
        self._buffers["coef"] = torch.full_like(value.detach(), self.controller.coef)

    @property
    def coef(self) -> Tensor:
        """The coefficient for the next batch, a scalar buffer; the controller decides it, this shows it."""
        buffer = self._buffers["coef"]
        assert buffer is not None
        return buffer.fill_(self.controller.coef)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; `coef`, a number or a tensor, in the controller."""
        if name == "coef":
            self.controller.load_state_dict({"coef": float(value)})
            self.hold_coef(self._buffers["coef"])
        else:
            super().__setattr__(name, value)

    @property
    def sample_log_prob_key(self) -> Key:
        """The key of the behaviour log-probs."""
        return self.keys.log_probs

    def prepared(self, td: TensorDictBase) -> TensorDictBase:
        """Place the log-probs of a wrapper that returns those of responses alone."""
        return with_full_log_probs(td, self.keys.log_probs)

    def is_done(self, td: TensorDictBase) -> bool:
        """Return whether a batch has been through the transform: it has the penalty, or was read from a store."""
        return holds(td, self.keys.penalty) or (holds(td, ROW_ID) and holds(td, self.keys.ref_log_probs))

    @torch.no_grad()
    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """Return the shaped reward, the penalty and its coefficient; nothing for a batch that has them."""
        if self.keys.penalty in batch:
            return {}
        if ROW_ID in batch and self.keys.ref_log_probs in batch:
            return {}  # read from a store, with the reward as the write path shaped it
        log_probs = per_token(batch, self.keys.log_probs)
        if log_probs is None or log_probs.lengths is None:
            raise MissingKeyError(
                f"the batch has no behaviour log-probs under {self.keys.log_probs!r}; the collector or "
                "RetrieveLogProb(..., behaviour_model=...) must provide them"
            )
        lengths = log_probs.lengths
        mask = scored_positions(batch, log_probs, self.assistant_only)
        out: dict[Key, Flat] = {}
        ref = per_token(batch, self.keys.ref_log_probs, log_probs)
        if ref is None:
            ref = self._reference(batch, log_probs, mask, fill=float("nan") if writing else 0.0)
            out[self.keys.scored] = ref
        lp, lr, valid, k1 = _k1(log_probs.values, ref.values, mask)
        kl = segment_sum(k1, lengths)
        coef = self.controller.coef
        base, shape = self._base(batch, log_probs, mask)
        if self.add_to_reward:
            out[self.keys.shaped] = Flat((base - coef * k1).float().reshape(shape), lengths)
            if TASK_REWARD not in batch:
                out[TASK_REWARD] = Flat(segment_sum(base, lengths).float())
        out[self.keys.penalty] = Flat(k1.float(), lengths)
        out[KL_COEF] = Flat(torch.full((lengths.numel(),), coef if self.add_to_reward else 0.0))
        self._measure(lp[valid], lr[valid], kl, coef)
        if writing:
            self._advance(kl)
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
        self._measure(lp[valid], lr[valid], kl, self.controller.coef)
        self._advance(kl)

    def _advance(self, kl: Tensor) -> None:
        self.controller.update(kl)
        self.hold_coef(self._buffers["coef"])

    def _reference(self, batch: Trajectories, like: Flat, mask: Tensor, *, fill: float) -> Flat:
        model: Any = self.ref_model
        if model is None:
            raise MissingKeyError(
                f"the batch has no reference log-probs under {self.keys.ref_log_probs!r}, and KLRewardTransform has "
                "no model: in the list of transforms, add RetrieveLogProb(reference) after KLRewardTransform, or pass "
                "ref_model="
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
        reward = batch.get(self.keys.reward)
        reward = reward if isinstance(reward, Flat) else batch.get(TASK_REWARD)
        if not isinstance(reward, Flat):
            raise MissingKeyError(f"the batch has neither {self.keys.reward!r} nor {TASK_REWARD!r}")
        values, total = reward.values.detach().double(), int(lengths.sum())
        if reward.lengths is not None and torch.equal(reward.lengths, lengths) and values.numel() == total:
            return values.reshape(-1), tuple(values.shape)
        if reward.lengths is None and values.ndim >= 2 and values.numel() == total != lengths.numel():
            return values.reshape(-1), (total,)
        if values.numel() != lengths.numel():
            raise DataError(
                f"the reward has {values.numel()} values for {lengths.numel()} trajectories with {total} tokens in "
                "total; it "
                "must have one value per trajectory or per token"
            )
        base = torch.zeros(total, dtype=torch.float64)
        base[last_position(mask, lengths)] = outcomes(batch, values)
        return base, (total,)

    def _measure(self, lp: Tensor, lr: Tensor, kl: Tensor, coef: float) -> None:
        self.stats = {**kl_figures(lp, lr), "kl": float(kl.mean()), "coef": coef, "tokens": float(lp.numel())}

    def get_extra_state(self) -> dict[str, Any]:
        """Return the controller's state and the last measurements."""
        return {"controller": dict(self.controller.state_dict()), "stats": dict(self.stats)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_extra_state` returned."""
        self.controller.load_state_dict(state["controller"])
        self.hold_coef(self._buffers["coef"])
        self.stats = dict(state["stats"])


def constant_controller(coef: Any) -> KLController:
    """Return a controller for a plain coefficient."""
    if isinstance(coef, KLController):
        raise DefinitionError(
            f"coef is of type {type(coef).__name__}; it must be a number. Pass a controller as controller=."
        )
    return ConstantKLController(kl_coef=float(coef))


def _k1(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both log-probs in float64, the mask of positions where both are finite, and k1 (0 elsewhere)."""
    lp, lr = log_probs.detach().double(), ref_log_probs.detach().double()
    k1 = kl_k1(lp, lr)
    valid = mask & k1.isfinite()  # finite where both log-probs are
    return lp, lr, valid, torch.where(valid, k1, 0.0)
