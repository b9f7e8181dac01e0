"""The GRPO family of losses, from hidden states to scalars without [B, T, V] logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from torch import nn
from torchrl.objectives.common import LossModule
from torchrl.objectives.llm.grpo import GRPOLossOutput as _TorchRLOutput

from rlhf_pipeline.config import GRPO
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.upload import download, upload
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.functional import policy_loss as pl
from rlhf_pipeline.functional.aggregation import token_weights
from rlhf_pipeline.functional.diagnostics import ess_from_sums, row_mean, sequence_weight_sums, weight_sums
from rlhf_pipeline.functional.head import fused_token_loss, token_log_probs
from rlhf_pipeline.functional.kl import kl_loss
from rlhf_pipeline.functional.objectives import PolicyTokens
from rlhf_pipeline.functional.token_choice import clip_cov_mask, top_entropy_mask
from rlhf_pipeline.losses.actors import Actor, HeadRows, Scores, adapt_actor
from rlhf_pipeline.losses.loss_batch import LossBatch, read_batch
from rlhf_pipeline.losses.loss_settings import KEYWORDS, TORCHRL_DEFAULTS, LossSettings, changed, loss_settings
from rlhf_pipeline.settings import lists_settings

__all__ = ["GRPOLoss", "GRPOLossOutput"]

_TERMS = ("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference")
_MEANS = {
    "clip_fraction": "num_tokens",
    "clip_fraction_low": "num_tokens",
    "clip_fraction_high": "num_tokens",
    "kl_approx": "num_tokens",
    "entropy": "num_tokens",
    "kl_to_ref": "num_ref_tokens",
    "kl_to_inference": "num_tokens",
    "sampler_gap": "num_tokens",
}
"""The figures that are means, each with the field that holds the number of tokens."""
_ESS = {
    "ESS": ("num_tokens", "weight_sum", "weight_square_sum"),
    "ess_sequence": ("num_sequences", "sequence_weight_sum", "sequence_weight_square_sum"),
}
"""The effective sample sizes, each with the three sums from which it is computed."""
_SUMS = tuple(dict.fromkeys([*_MEANS.values(), *(name for sums in _ESS.values() for name in sums)]))


class GRPOLossOutput(_TorchRLOutput):
    """Loss terms with gradient, and diagnostics without. All are scalars, except unreduced losses ([B, T]).

    Every mean is over the tokens that the mask keeps, so prompt and padding do not dilute it. Units are nats where
    a unit applies.

    Attributes:
        loss_objective: the policy loss.
        clip_fraction: share of tokens for which the clipped branch is taken.
        kl_approx: mean of proximal minus current log-prob.
        ESS: effective sample size of the token ratios, (0, 1]; 0 if there are no tokens.
        entropy: mean entropy of the policy, or None if the actor gives none.
        loss_entropy: minus the entropy bonus; None without one.
        loss_kl_to_ref: the KL term against the reference; None without one.
        kl_to_ref: mean KL estimate against the reference; None without reference log-probs.
        loss_kl_to_inference: the KL term against the behaviour policy; None without one.
        kl_to_inference: mean KL estimate against the behaviour policy.
        clip_fraction_low: the share at the lower bound.
        clip_fraction_high: the share at the upper bound.
        ess_sequence: effective sample size of the products of ratios, over sequences.
        num_tokens: tokens that the mask keeps.
        weight_sum: sum of the token ratios.
        weight_square_sum: sum of their squares.
        sampler_gap: mean absolute difference of current and behaviour log-prob.
        num_sequences: trajectories with a token that the mask keeps.
        sequence_weight_sum: sum of the products of ratios.
        sequence_weight_square_sum: sum of their squares.
        num_ref_tokens: tokens of the mask whose reference log-prob is finite; None without reference log-probs.

    >>> out = GRPOLossOutput(*(torch.tensor(x) for x in (0.5, 0.0, 0.0, 1.0)), loss_entropy=torch.tensor(-0.25))
    >>> out.total_loss()
    tensor(0.2500)
    """

    clip_fraction_low: torch.Tensor | None = None
    clip_fraction_high: torch.Tensor | None = None
    ess_sequence: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    weight_sum: torch.Tensor | None = None
    weight_square_sum: torch.Tensor | None = None
    sampler_gap: torch.Tensor | None = None
    num_sequences: torch.Tensor | None = None
    sequence_weight_sum: torch.Tensor | None = None
    sequence_weight_square_sum: torch.Tensor | None = None
    num_ref_tokens: torch.Tensor | None = None

    @property
    def _terms(self) -> dict[str, torch.Tensor]:
        """The loss terms that are present."""
        return {name: value for name in _TERMS if (value := getattr(self, name)) is not None}

    def total_loss(self) -> torch.Tensor:
        """Return the sum of all loss terms, to call `backward` on."""
        return reduce(add, self._terms.values())

    def mean(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """With `reduce=True`, return the mean of the loss terms; otherwise `TensorDict.mean` of every field.

        TorchRL's recipes step on `loss.mean(reduce=True)`. It omits the diagnostics, so the step does not depend
        on their number.
        """
        return TensorDict(self._terms).mean(reduce=True, **kwargs) if reduce else super().mean(*args, **kwargs)

    def sum(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """With `reduce=True`, return the sum of the loss terms, as `total_loss`; otherwise the sum of every field."""
        return TensorDict(self._terms).sum(reduce=True, **kwargs) if reduce else super().sum(*args, **kwargs)

    @staticmethod
    def field_names() -> tuple[str, ...]:
        """Return all fields: the losses, then the diagnostics."""
        return (*_TERMS, *GRPOLossOutput.diagnostic_names())

    @staticmethod
    def diagnostic_names() -> tuple[str, ...]:
        """Return the fields that have no gradient."""
        return (*_MEANS, *_ESS, *_SUMS)

    @classmethod
    def merge(cls, outputs: Sequence[GRPOLossOutput]) -> GRPOLossOutput:
        """Merge the outputs of several micro-batches, detached, into one output; every metric is merged from sums.

        Args:
            outputs: of the micro-batches of one step, with loss weights that were fixed before the split.

        Raises:
            DataError: there is no output.
        """
        if not outputs:
            raise DataError("there is no output to merge: the step has no micro-batches.")
        merged: dict[str, Any] = {}
        for name in (*_TERMS, *_SUMS):
            values = [value.detach() for out in outputs if (value := getattr(out, name)) is not None]
            if values:
                merged[name] = torch.stack(values).sum(0)
        for name, count in _MEANS.items():
            parts = [(v.detach(), getattr(out, count)) for out in outputs if (v := getattr(out, name)) is not None]
            if parts:
                total = torch.stack([value.double() * tokens for value, tokens in parts]).sum(0)
                merged[name] = (total / merged[count].clamp_min(1)).to(parts[0][0].dtype)
        for name, sums in _ESS.items():
            merged[name] = ess_from_sums(*(merged[key] for key in sums)).to(outputs[0].ESS.dtype)
        return cls(**merged)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The constants of the loss on the masked tokens, row-major; each [N]."""

    index: torch.Tensor
    column: torch.Tensor
    token: torch.Tensor
    advantage: torch.Tensor
    proximal: torch.Tensor
    behaviour: torch.Tensor
    ref: torch.Tensor | None
    weight: torch.Tensor
    policy_weight: torch.Tensor
    sequences: int


class GRPOLoss(LossModule):
    """Clipped policy-gradient loss with group-relative advantages, read from a padded batch of trajectories.

    `loss = sum over tokens of weight * l`, with `l = -min(w A, clip(w, 1 - low, 1 + high) A)` and
    `w = exp(log pi - log pi_proximal)` for the default objective. DeepSeekMath, arXiv:2402.03300; DAPO's asymmetric
    clip, arXiv:2503.14476; CISPO, arXiv:2506.13585; GSPO, arXiv:2507.18071.

    Only the tokens of the loss reach the head, in chunks, so `[B, T, V]` logits never exist. With
    a `"loss_weight"` [B, T] in the batch (see `functional.aggregation.token_weights`) the weights are fixed before
    batching, and the gradient is the same for every split into micro-batches. Without it the weights come from
    this batch's own counts.

    A token is excluded from the loss and the counts if its log-prob is not finite under the behaviour policy, the
    proximal policy (with `decoupled`), or the reference (with a KL term against it). With `"loss_weight"` the caller
    counts, and must exclude it there. Every ragged leaf is padded on the same side.

    The batch is constant: only the log-probs of the actor have a gradient, and all are taken at the temperature `T` of
    sampling, `log_softmax(z / T)`. A leaf that requires a gradient is rejected.

    Args:
        actor_network: `CausalLMPolicy` or anything with its `hidden_states`, `head_weight`, `temperature`; a
            transformers model; a TorchRL wrapper; a module with `log_probs(...)`; or one that returns logits [B, T, V].
        settings: the settings of a definition, `GRPO(...)`; None takes TorchRL's defaults (an entropy bonus of 0.01).
        device: where the batch's tensors are moved; None does not move them.
        **keywords: settings by name, in place of those of `settings`: the fields of `GRPO` (docs/settings.md) and of
            `losses.loss_settings.LossSettings`, each with its meaning there. TorchRL's spelling is accepted too:
            `clip_epsilon` (one number or (low, high)), `aggregation` (also `prompt_mean`, `bnpo`, `none`),
            `reduction`, `kl_to_ref_coeff=None`, `ref_log_prob_padding_side`; and bounds as a pair (low, high):
            `icepop` with `icepop_level`, `clip_cov_bounds`, and `sapo_tau` for the advantage above 0 and elsewhere.

    Attributes:
        settings: the settings of the loss, frozen. Each is also an attribute: `loss.entropy_coeff = 0.5` replaces them.

    Raises:
        DefinitionError: a setting is unknown or cannot work; the message gives the reason.

    Returns:
        `GRPOLossOutput`.

    >>> from tensordict import TensorDict
    >>> class Bigram(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = nn.Embedding(5, 4)
    ...         self.head_weight = nn.Parameter(torch.ones(5, 4))
    ...     def hidden_states(self, input_ids, attention_mask):
    ...         return self.embedding(input_ids)
    >>> mask = torch.tensor([[False, True, True]])
    >>> batch = TensorDict({
    ...     "tokens": {"full": torch.tensor([[0, 3, 4]])},
    ...     "masks": {"all_assistant_mask": mask, "all_attention_mask": torch.ones_like(mask)},
    ...     "log_probs": {"full": torch.full((1, 3), 0.2).log()},
    ...     "advantage": torch.ones(1, 3),
    ... }, [1])
    >>> out = GRPOLoss(Bigram(), entropy_bonus=False)(batch)
    >>> out.total_loss().backward()
    >>> round(out.loss_objective.item(), 4), round(out.entropy.exp().item(), 4), out.num_tokens.item()
    (-1.0, 5.0, 2.0)
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """The keys that `set_keys` can change."""

        advantage: NestedKey = keys.ADVANTAGE
        action: NestedKey = keys.TOKENS
        sample_log_prob: NestedKey = keys.LOG_PROBS
        ref_log_probs: NestedKey = keys.REF_LOG_PROBS
        prox_log_probs: NestedKey = ("prox_log_probs", "full")
        assistant_mask: NestedKey = keys.ASSISTANT_MASK
        attention_mask: NestedKey = keys.ATTENTION_MASK
        loss_weight: NestedKey = keys.LOSS_WEIGHT
        group: NestedKey = keys.GROUP_ID

    tensor_keys: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    """The keys, as changed by `set_keys`: TorchRL's property, whose type lacks the keys of this class."""
    output_type: type[GRPOLossOutput] = GRPOLossOutput

    settings: LossSettings
    _adapter: tuple[Any, Actor] | None

    @lists_settings(LossSettings, TORCHRL_DEFAULTS)
    def __init__(
        self,
        actor_network: nn.Module | None = None,
        settings: GRPO | None = None,
        *,
        device: torch.device | str | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.batch_device = None if device is None else torch.device(device)
        self.settings = loss_settings(settings, keywords)
        self._set_in_keys()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in KEYWORDS:
            name, value = "settings", changed(self.settings, {name: value})
        if name == "settings":
            self._objective, self._adapter = value.checked_objective(), None
            self._is_token_level, self._active_terms = value.is_token_level, value.active_terms
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settings, name) if name in KEYWORDS else super().__getattr__(name)

    @property
    def clip_epsilon_low(self) -> float:
        """The distance below 1 at which the ratio is clipped."""
        return self.settings.clip_epsilon[0]

    @property
    def clip_epsilon_high(self) -> float:
        """The distance above 1 at which the ratio is clipped."""
        return self.settings.clip_epsilon[1]

    @property
    def clip_epsilon(self) -> torch.Tensor:
        """The distances below and above 1 at which the ratio is clipped: one number if both are equal, else `[2]`."""
        bounds = sorted({self.clip_epsilon_low, self.clip_epsilon_high})
        return (
            torch.tensor(bounds[0])
            if len(bounds) == 1
            else torch.tensor([self.clip_epsilon_low, self.clip_epsilon_high])
        )

    @property
    def actor_network_params(self) -> TensorDictParams | None:
        """The trained parameters of the actor; the loss has no copy of them."""
        actor = self.actor_network
        return None if actor is None else TensorDictParams(TensorDict.from_module(actor), no_convert=True)

    target_actor_network_params = actor_network_params
    """The same parameters: there is no delayed copy of the actor."""
    critic_network = critic_network_params = target_critic_network_params = None
    """GRPO has no critic."""

    @property
    def functional(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """False: the parameters remain in the actor."""
        return False

    @property
    def in_keys(self) -> Any:
        """The keys that the loss reads."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, value: Any) -> None:
        self._in_keys = value

    def _set_in_keys(self) -> None:
        k = self.tensor_keys
        in_keys = [*(getattr(self.actor_network, "in_keys", None) or ())]
        in_keys += [k.action, k.sample_log_prob, k.advantage, k.ref_log_probs]
        in_keys += [k.assistant_mask, k.attention_mask]
        self._in_keys = list(dict.fromkeys(in_keys))

    @property
    def out_keys(self) -> Any:
        """The fields of the output that this configuration fills."""
        if getattr(self, "_out_keys", None) is not None:
            return self._out_keys
        names = [*self._active_terms]
        names[1:1] = ["clip_fraction", "kl_approx", "ESS", "entropy"]
        return names + [name for name in self.output_type.diagnostic_names() if name not in names]

    @out_keys.setter
    def out_keys(self, value: Any) -> None:
        self._out_keys = value

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """There is no value estimator; `set_keys` only renews the input keys."""
        self._set_in_keys()

    @torch.no_grad()
    def choose_tokens(
        self, batches: Sequence[LossBatch], *, rows: Sequence[torch.Tensor] | None = None, seed: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Score all micro-batches of a step, and return which of their tokens keep the policy loss.

        Args:
            batches: of the whole step.
            rows: int64 [B] per batch, the position of each row in the step, which makes the choice independent of the
                split; by default the order of the batches.
            seed: of the draw of `clip_cov`.

        Returns:
            Per batch, bool [B, T] on the host, False outside the batch's mask.

        Raises:
            DefinitionError: the entropy decides, but the actor has none.
        """
        scored = []
        for batch in batches:
            scored_rows = self._actor().rows(batch, entropy=self.settings.top_entropy_quantile < 1)
            scored.append(self._choice_figures(self._gather(batch, scored_rows[0].device), scored_rows))
        figures, masks = download(scored), [batch.mask.cpu() for batch in batches]
        counts = torch.cat([mask.sum(1) for mask in masks])
        order = torch.arange(len(counts)) if rows is None else torch.cat(list(rows))
        # The rows are in the order of the split; a token's key is its row's place in the step, and the sort is stable.
        back = order.repeat_interleave(counts).argsort(stable=True)
        log_probs, advantage, clipped, entropy = torch.cat(figures, 1)[:, back]
        keep = top_entropy_mask(entropy, self.settings.top_entropy_quantile)
        if (share := self.settings.clip_cov) is not None:
            low, high = self.settings.clip_cov_low, self.settings.clip_cov_high
            keep &= clip_cov_mask(log_probs, advantage, clipped > 0, share=share, low=low, high=high, seed=seed)
        flat = torch.empty_like(keep).index_put((back,), keep)
        chosen = flat.split([int(mask.sum()) for mask in masks])
        return [mask.masked_scatter(mask, part) for mask, part in zip(masks, chosen, strict=True)]

    @torch.no_grad()
    def token_figures(self, batch: LossBatch) -> torch.Tensor:
        """Return the policy's log-prob and entropy of the tokens of a batch's mask, in nats.

        Returns:
            float32 [2, B, T] on the host, NaN outside the mask.

        Raises:
            DefinitionError: the actor has no entropy.
        """
        scored_rows = self._actor().rows(batch, entropy=True)
        log_probs, entropy = self._scores(scored_rows, self._gather(batch, scored_rows[0].device))
        if entropy is None:
            raise DefinitionError(
                "learn.keep_token_figures needs an actor that returns entropies. Set learn.keep_token_figures=false."
            )
        mask, values = batch.mask.cpu(), torch.stack([log_probs, entropy]).float().cpu()
        return torch.full((2, *mask.shape), torch.nan).masked_scatter(mask.expand(2, *mask.shape), values)

    def _scores(self, scored_rows: HeadRows | Scores, rows: TokenRows) -> Scores:
        """Return log-probs and entropies, from the head if they are not there yet."""
        if isinstance(scored_rows, Scores):
            return scored_rows
        scores = token_log_probs(
            scored_rows.hidden, scored_rows.head, rows.token, chunk_size=self.settings.chunk_size, return_entropy=True
        )
        return Scores(*scores)

    def _choice_figures(self, rows: TokenRows, scored_rows: HeadRows | Scores) -> torch.Tensor:
        """Return log-prob, advantage, whether the clip is taken, and entropy of each token, float64 [4, N]."""
        log_probs, entropy = self._scores(scored_rows, rows)
        entropy = torch.zeros_like(log_probs) if entropy is None else entropy
        clipped = torch.zeros_like(log_probs)
        if self.settings.clip_cov is not None:
            loss, _ = self._objective.loss(
                self._tokens(
                    log_probs, rows.advantage, rows.proximal, rows.behaviour, entropy, rows.index, rows.sequences
                )
            )
            clipped = (loss.clipped_low | loss.clipped_high).to(log_probs.dtype)
        return torch.stack([log_probs.double(), rows.advantage.double(), clipped.double(), entropy.double()])

    def _actor(self) -> Actor:
        """Return how to score with the actor, determined once per actor."""
        if self._adapter is None or self._adapter[0] is not self.actor_network:
            actor = adapt_actor(
                self.actor_network,
                temperature=self.settings.temperature,
                strategy=self.settings.masking_strategy,
                samples=self.settings.samples_mc_entropy,
            )
            self._adapter = (self.actor_network, actor)
        return self._adapter[1]

    def forward(self, tensordict: TensorDictBase | LossBatch) -> GRPOLossOutput:
        """Compute the loss and its diagnostics.

        Args:
            tensordict: a batch [B] with the keys of `in_keys`, or its tensors; it is not changed.

        Raises:
            DataError: a key is missing or a shape does not fit.
        """
        batch, settings = tensordict, self.settings
        if not isinstance(batch, LossBatch):
            batch = read_batch(
                batch,
                self._tensor_keys,
                masking_strategy=settings.masking_strategy,
                side=settings.padding_side,
                device=self.batch_device,
                decoupled=settings.decoupled,
                kl_to_ref=bool(settings.kl_to_ref_coeff),
            )
        if settings.kl_to_ref_coeff and batch.ref is None:
            raise MissingKeyError(
                f"kl_to_ref_coeff is {settings.kl_to_ref_coeff}, but the batch has no "
                f"{self.tensor_keys.ref_log_probs!r}. Add RetrieveLogProb to the write path, or omit the "
                "coefficient."
            )
        if settings.chooses_tokens and batch.keep is None:
            (chosen,) = self.choose_tokens([batch], seed=(int(torch.randint(2**31, ())),))
            batch = replace(batch, keep=chosen.to(batch.mask.device))
        scored_rows = self._actor().rows(batch, entropy=settings.entropy_bonus or self._objective.needs_entropy)
        rows = self._gather(batch, scored_rows[0].device)
        names = self._active_terms
        if isinstance(scored_rows, HeadRows) and self._is_token_level and settings.head != "recompute":
            constants = [rows.advantage, rows.proximal, rows.behaviour, rows.weight, rows.policy_weight]
            out = fused_token_loss(  # with the gradient computed in the forward pass
                scored_rows.hidden,
                scored_rows.head,
                rows.token,
                self._weighted_terms,
                constants if rows.ref is None else [*constants, rows.ref],
                terms=len(names),
                entropy_gradient=settings.entropy_bonus,
                chunk_size=settings.chunk_size,
            )
            losses, log_probs, entropy = dict(zip(names, out.losses, strict=True)), out.log_probs, out.entropy
        else:
            log_probs, entropy = self._scores(scored_rows, rows)
            losses = self._losses(batch, rows, names, log_probs, entropy)
        fields: dict[str, Any] = {**losses, **self._diagnostics(rows, log_probs, entropy)}
        return self.output_type(**fields)

    def _losses(
        self,
        batch: LossBatch,
        rows: TokenRows,
        names: Sequence[str],
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return the terms from log-probs, summed or put back in [B, T]."""
        policy_weight = rows.policy_weight
        if (threshold := self.settings.off_policy_threshold) is not None:
            policy_weight = policy_weight * pl.off_policy_mask(
                log_probs, rows.behaviour, rows.advantage, rows.index, rows.sequences, threshold
            )
        terms = self._weighted_terms(
            log_probs,
            entropy,
            rows.advantage,
            rows.proximal,
            rows.behaviour,
            rows.weight,
            policy_weight,
            rows.ref,
            index=rows.index,
            sequences=rows.sequences,
        )
        if self.settings.kl_mask_threshold:
            keep = self._trust_region(batch, rows, log_probs.detach())
            terms = [term * keep for term in terms]
        if self.settings.reduction != "none":
            return {name: term.sum() for name, term in zip(names, terms, strict=True)}
        empty = torch.zeros(batch.mask.shape, device=log_probs.device, dtype=log_probs.dtype)
        at = (rows.index, rows.column)
        return {name: empty.index_put(at, term.to(empty.dtype)) for name, term in zip(names, terms, strict=True)}

    # -- the terms, on the masked tokens ----------------------------------------------------------------------

    def _gather(self, batch: LossBatch, device: torch.device) -> TokenRows:
        """Gather the masked tokens `_N` on the batch's device, and compute their weights on that of the scores.

        The values are float32, or float64 for float64 log-probs. A batch on the host causes no wait for the device.
        """
        settings = self.settings
        at = row_N, column_N = batch.mask.nonzero(as_tuple=True)
        dtype = torch.promote_types(batch.behaviour.dtype, torch.float32)
        behaviour_N = batch.behaviour[at].to(dtype)
        sequences = batch.tokens.shape[0]
        if batch.weight is not None:
            weight_N = batch.weight[at].to(dtype)
        elif settings.reduction != "mean":
            weight_N = torch.ones_like(behaviour_N)
        else:
            most = settings.max_completion_tokens
            weight_B = token_weights(
                batch.mask.sum(1), settings.aggregation, groups=batch.group, max_completion_tokens=most, dtype=dtype
            )
            weight_N = weight_B[row_N]
        proximal_N = behaviour_N if batch.proximal is None else batch.proximal[at].to(dtype)
        columns = [row_N, column_N, batch.tokens[at], batch.advantage[at].to(dtype), behaviour_N, proximal_N, weight_N]
        if batch.keep is not None:
            columns.append(weight_N * batch.keep[at])
        if batch.ref is not None:
            columns.append(batch.ref[at].to(dtype))
        row_N, column_N, token_N, advantage_N, behaviour_N, proximal_N, weight_N, *more = upload(columns, device)
        policy_weight_N = weight_N if batch.keep is None else more.pop(0)
        if settings.tis_cap is not None:
            bounds = settings.tis_cap, settings.tis_floor
            if settings.tis_level == "token":
                factor_N = pl.tis_weight(proximal_N, behaviour_N, *bounds)
            else:
                factor_N = pl.sequence_tis_weight(proximal_N, behaviour_N, row_N, sequences, *bounds)
            policy_weight_N = policy_weight_N * factor_N
        if settings.icepop is not None:
            interval = settings.icepop_low, settings.icepop_high
            if settings.icepop == "token":
                ratio_N = pl.icepop_weight(proximal_N, behaviour_N, *interval)
            else:
                ratio_N = pl.sequence_icepop_weight(
                    proximal_N, behaviour_N, row_N, sequences, *interval, product=settings.icepop == "product"
                )
            policy_weight_N = policy_weight_N * (ratio_N if settings.tis_cap is None else ratio_N > 0)
        return TokenRows(
            index=row_N,
            column=column_N,
            token=token_N,
            advantage=advantage_N,
            proximal=proximal_N,
            behaviour=behaviour_N,
            ref=more[0] if more else None,
            weight=weight_N,
            policy_weight=policy_weight_N,
            sequences=sequences,
        )

    def _kl(self, log_probs: torch.Tensor, reference: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
        sampler = behaviour if self.settings.kl_importance_weight else None
        return kl_loss(log_probs, reference, self.settings.kl_estimator, behaviour=sampler)

    def _tokens(
        self,
        log_probs: torch.Tensor,
        advantage: torch.Tensor,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        entropy: torch.Tensor | None,
        index: torch.Tensor | None,
        sequences: int,
    ) -> PolicyTokens:
        """Return what the objective reads, with this loss's settings."""
        settings = self.settings
        low, high = settings.clip_epsilon
        return PolicyTokens(
            log_probs=log_probs,
            proximal=proximal,
            behaviour=behaviour,
            advantage=advantage,
            index=index,
            sequences=sequences,
            entropy=entropy if self._objective.needs_entropy else None,
            mask_level=settings.icepop,
            low=low,
            high=high,
            dual_clip=settings.dual_clip,
            delta=settings.delta,
            sapo_tau=(settings.sapo_tau_positive, settings.sapo_tau_negative),
            dppo=settings.dppo,
            vespo=settings.vespo,
        )

    def _weighted_terms(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        advantage: torch.Tensor,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        weight: torch.Tensor,
        policy_weight: torch.Tensor,
        ref: torch.Tensor | None = None,
        *,
        index: torch.Tensor | None = None,
        sequences: int = 0,
    ) -> list[torch.Tensor]:
        """Return the weighted loss terms per token, in the order of `LossSettings.active_terms`; each [n].

        Unless the objective is one of sequences, any part of the tokens may be passed, for example a chunk. A token
        that the policy bans (log-prob -inf) has no policy loss and no KL.
        """
        has_log_prob = torch.isfinite(log_probs.detach())
        log_probs = torch.where(has_log_prob, log_probs, proximal)
        policy_weight = torch.where(has_log_prob, policy_weight, 0.0)
        kl_weight = torch.where(has_log_prob, weight, 0.0)
        if index is not None:
            index = torch.where(has_log_prob, index, sequences)  # of its own sequence
        loss, _ = self._objective.loss(
            self._tokens(log_probs, advantage, proximal, behaviour, entropy, index, sequences + 1)
        )
        settings, terms = self.settings, [policy_weight * loss.loss]
        if settings.entropy_bonus and entropy is not None:
            terms.append(entropy * (weight * -settings.entropy_coeff))
        if settings.kl_to_ref_coeff and ref is not None:
            terms.append(self._kl(log_probs, ref, behaviour) * (kl_weight * settings.kl_to_ref_coeff))
        if settings.kl_to_inference_coeff:
            terms.append(self._kl(log_probs, behaviour, behaviour) * (kl_weight * settings.kl_to_inference_coeff))
        return terms

    def _trust_region(self, batch: LossBatch, rows: TokenRows, log_probs: torch.Tensor) -> torch.Tensor:
        """Return the factor of every token under `kl_mask_threshold`: 0 outside the region.

        If the weights come from this batch's own counts, they are computed again for the remaining tokens.
        """
        settings = self.settings
        threshold = settings.kl_mask_threshold or float("inf")
        keep_N = pl.kl_trust_mask(log_probs - rows.behaviour, threshold).to(log_probs.dtype)
        if batch.weight is not None or settings.reduction != "mean":
            return keep_N
        left_B = pl.indexed_sum(keep_N, rows.index, rows.sequences)
        weight_B = token_weights(
            left_B,
            settings.aggregation,
            groups=None if batch.group is None else batch.group.to(left_B.device),
            max_completion_tokens=settings.max_completion_tokens,
            dtype=rows.weight.dtype,
        )
        return keep_N * weight_B[rows.index] / rows.weight

    @torch.no_grad()
    def _diagnostics(self, rows: TokenRows, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> dict[str, Any]:
        """Return the diagnostics of `GRPOLossOutput` over the masked tokens, with the sums that they merge from."""
        known_N = torch.isfinite(log_probs.detach())
        lp_N = torch.where(known_N, log_probs.detach(), rows.proximal)
        index_N = torch.where(known_N, rows.index, rows.sequences)  # a banned token is its own sequence
        loss, log_ratio_N = self._objective.loss(
            self._tokens(lp_N, rows.advantage, rows.proximal, rows.behaviour, entropy, index_N, rows.sequences + 1)
        )
        low, high = row_mean(loss.clipped_low, known_N), row_mean(loss.clipped_high, known_N)
        tokens = weight_sums(log_ratio_N, known_N)
        sequences = sequence_weight_sums(lp_N - rows.proximal, rows.index, rows.sequences, known_N)
        figures = {
            "clip_fraction": low + high,
            "clip_fraction_low": low,
            "clip_fraction_high": high,
            "kl_approx": row_mean(rows.proximal - lp_N, known_N),
            "ESS": ess_from_sums(*tokens).float(),
            "ess_sequence": ess_from_sums(*sequences).float(),
            "entropy": None if entropy is None else row_mean(entropy, known_N),
            "kl_to_ref": None,
            "kl_to_inference": row_mean(kl_loss(lp_N, rows.behaviour, self.settings.kl_estimator), known_N),
            "sampler_gap": row_mean((lp_N - rows.behaviour).abs(), known_N),
            **dict(zip(("num_tokens", "weight_sum", "weight_square_sum"), tokens, strict=True)),
            **dict(zip(("num_sequences", "sequence_weight_sum", "sequence_weight_square_sum"), sequences, strict=True)),
        }
        if rows.ref is not None:
            known_N = known_N & torch.isfinite(rows.ref)
            figures["kl_to_ref"] = row_mean(kl_loss(lp_N, rows.ref, self.settings.kl_estimator), known_N)
            figures["num_ref_tokens"] = known_N.sum().double()
        return figures
