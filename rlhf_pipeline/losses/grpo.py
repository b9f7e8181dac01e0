"""The GRPO family of losses, from hidden states to scalars without [B, T, V] logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams
from torch import nn
from torchrl.objectives.common import LossModule
from torchrl.objectives.llm.grpo import GRPOLossOutput as _TorchRLOutput

from rlhf_pipeline.config import DPPO, VESPO, KLEstimator, Level, MaskLevel, Objective
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.data.upload import download, upload
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError, refuse_unknown
from rlhf_pipeline.functional import policy_loss as pl
from rlhf_pipeline.functional.aggregation import token_weights
from rlhf_pipeline.functional.diagnostics import ess_from_sums, row_mean, sequence_weight_sums, weight_sums
from rlhf_pipeline.functional.head import fused_token_loss, token_log_probs
from rlhf_pipeline.functional.kl import kl_loss
from rlhf_pipeline.functional.objectives import ObjectiveFunction, PolicyTokens, objective_of
from rlhf_pipeline.functional.token_choice import clip_cov_mask, top_entropy_mask
from rlhf_pipeline.losses._checks import HARMLESS, REFUSED, check_arguments
from rlhf_pipeline.losses.actors import Actor, HeadRows, Scores, adapt_actor
from rlhf_pipeline.losses.loss_batch import LossBatch, MaskingStrategy, read_batch

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
"""The effective sample sizes, each with the three sums that it is computed from."""
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

        TorchRL's recipes step on `loss.mean(reduce=True)`. It leaves out the diagnostics, so the step does not depend
        on their number.
        """
        return TensorDict(self._terms).mean(reduce=True, **kwargs) if reduce else super().mean(*args, **kwargs)

    def sum(self, *args: Any, reduce: bool | None = None, **kwargs: Any) -> Any:
        """With `reduce=True`, return the sum of the loss terms, as `total_loss`; otherwise that of every field."""
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
        """Merge the outputs of several micro-batches, detached, into that of one batch; every figure merges from sums.

        Args:
            outputs: of the micro-batches of one step, with loss weights that were fixed before the split.

        Raises:
            DataError: there is no output.
        """
        if not outputs:
            raise DataError("there is no output to merge: the step had no micro-batch.")
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


Head = Literal["auto", "fused", "recompute"]


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

    A token is left out of the loss and the counts if its log-prob is not finite under the behaviour policy, the
    proximal policy (with `decoupled`), or the reference (with a KL term against it). With `"loss_weight"` the caller
    counts, and must leave it out there. Every ragged leaf is padded on the same side.

    The batch is constant: only the log-probs of the actor have a gradient, and all are taken at the temperature `T` of
    sampling, `log_softmax(z / T)`. A leaf that requires a gradient is refused.

    Args:
        actor_network: `CausalLMPolicy` or anything with its `hidden_states`, `head_weight`, `temperature`; a
            transformers model; a TorchRL wrapper; a module with `log_probs(...)`; or one that returns logits [B, T, V].
        clip_epsilon: one number or (low, high). None means 0.2, and for `cispo` no lower clip.
        kl_mask_threshold: leave out tokens with `(log pi - log behaviour)^2 / 2` above this. Without `"loss_weight"`
            the weights come from the counts of the remaining tokens, as in TorchRL; with it, the weights stay.
        aggregation: `token_mean` (or `bnpo`), `sequence_mean` (or `prompt_mean`), `group_mean`, `sequence_sum`,
            `dr_grpo`, or `none`. `group_mean` reads `"group_id"` [B], unless the batch has `"loss_weight"`.
        entropy_bonus: add `-entropy_coeff * entropy` to the loss.
        samples_mc_entropy: samples of the entropy of a TorchRL distribution that has no closed form. The entropy of a
            language model's head is exact, and needs none.
        entropy_coeff: weight of the entropy bonus.
        reduction: `mean` (by `aggregation`), `sum` (plain sum over tokens), or `none` ([B, T], weighted only by
            `"loss_weight"`).
        kl_to_ref_coeff: weight of a KL term against `("next", "ref_log_probs", "full")`. None or 0 for none.
        kl_to_inference_coeff: weight of a KL term against the behaviour log-probs.
        device: where the batch's tensors are moved; None leaves them where they are.
        masking_strategy: `rlhf`: the assistant mask. `sft`: everything after the prompt (`num_prompt_tokens` or ragged
            prompt tokens; else from the first assistant token on). `generic`: every token but the first.
        ref_log_prob_padding_side: TorchRL's name of `padding_side`; here all leaves share one side.
        ref_log_prob_padding_value: the value at padded positions of ragged log-probs; nothing reads it.
        objective: a name in `functional.objectives.OBJECTIVES`: `grpo` (PPO's clip), `cispo`, `gspo`, `sapo`, `gmpo`,
            `dppo` or `vespo`; or a custom `ObjectiveFunction`.
        kl_estimator: `k3+` (the value of k3, the gradient of k2, which is the right one on-policy), `k3` or `k2`. `k1`
            is refused: as a loss its expected gradient is zero.
        kl_importance_weight: multiply the KL terms by `pi / behaviour`, for stale samples; see `functional.kl.kl_loss`.
        dual_clip: `c > 1`: where `A < 0` the loss is at most `-c A`. arXiv:1912.09729.
        delta: upper bound on `w` in the unclipped branch.
        decoupled: read proximal log-probs from `("prox_log_probs", "full")`; else the behaviour log-probs are proximal.
        tis_cap: with `decoupled`, multiply the policy loss by `min(exp(proximal - behaviour), tis_cap)`.
        tis_level: `token` or `sequence`.
        tis_floor: lower bound of that factor.
        icepop: with `decoupled`, (low, high): multiply the policy loss by `exp(proximal - behaviour)` where that
            is inside, by 0 elsewhere. With `tis_cap`, the factor inside is that of `tis_cap`.
        icepop_level: `token`, `sequence` for the geometric mean over the sequence, or `product`.
        off_policy_threshold: leave sequences of negative advantage out of the policy loss if the mean of
            `behaviour - current log-prob` over their tokens is above this; see `policy_loss.off_policy_mask`.
        top_entropy_quantile: the share of tokens, those of highest entropy, that have a policy loss; the counts stay.
            See `functional.token_choice.top_entropy_mask`. The choice is from all tokens of the batch, in a
            forward pass of its own; a learner makes it once for a step, see `choose_tokens`.
        clip_cov: the share of tokens that lose their policy loss for a high covariance; the counts stay. See
            `functional.token_choice.clip_cov_mask`. Chosen as above.
        clip_cov_bounds: (low, high), between which the covariance of such a token lies.
        sapo_tau: the temperatures of `sapo` where the advantage is above 0 and elsewhere.
        dppo: the trust region of `dppo`, around the sampler; see `functional.policy_loss.dppo_loss`.
        vespo: the weight of `vespo`; see `functional.policy_loss.vespo_loss`.
        max_completion_tokens: the constant of `dr_grpo`; not needed if the batch has `"loss_weight"`.
        temperature: of scoring; by default the actor's own, or 1 if it has none.
        head: `fused` (3 matmuls; token-level objectives), `recompute` (4 matmuls; anything), or `auto`.
        chunk_size: rows per chunk of the head.
        padding_side: where ragged leaves are padded.
        **unknown: refused, with a reason for TorchRL's arguments; `gamma=1` and `clip_value=False` are accepted.

    Raises:
        DefinitionError: an argument cannot work; the message says why.

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
    """The keys, as changed by `set_keys`: TorchRL's property, whose type lacks those that are ours."""
    output_type: type[GRPOLossOutput] = GRPOLossOutput

    def __init__(
        self,
        actor_network: nn.Module | None = None,
        *,
        clip_epsilon: float | tuple[float, float] | None = None,
        kl_mask_threshold: float | None = None,
        aggregation: str | None = "token_mean",
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float = 0.01,
        reduction: str | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | str | None = None,
        masking_strategy: MaskingStrategy = "rlhf",
        ref_log_prob_padding_side: Literal["left", "right"] | None = None,
        ref_log_prob_padding_value: float = 0.0,
        objective: Objective | ObjectiveFunction = "grpo",
        kl_estimator: KLEstimator = "k3+",
        kl_importance_weight: bool = False,
        dual_clip: float | None = None,
        delta: float | None = None,
        decoupled: bool = False,
        tis_cap: float | None = None,
        tis_level: Level = "token",
        tis_floor: float | None = None,
        icepop: tuple[float, float] | None = None,
        icepop_level: MaskLevel = "token",
        off_policy_threshold: float | None = None,
        top_entropy_quantile: float = 1.0,
        clip_cov: float | None = None,
        clip_cov_bounds: tuple[float, float] = (1.0, 5.0),
        sapo_tau: tuple[float, float] = (1.0, 1.05),
        dppo: DPPO | None = None,
        vespo: VESPO | None = None,
        max_completion_tokens: int | None = None,
        temperature: float | None = None,
        head: Head = "auto",
        chunk_size: int | None = None,
        padding_side: Literal["left", "right"] = "right",
        **unknown: Any,
    ) -> None:
        arguments = set(GRPOLoss.__init__.__annotations__) - {"unknown", "return"}
        refuse_unknown("GRPOLoss", unknown, arguments, REFUSED, HARMLESS)
        super().__init__()
        self.actor_network = actor_network
        self.clip_epsilon_low, self.clip_epsilon_high = pl.clip_bounds(clip_epsilon, objective)
        self.kl_mask_threshold = kl_mask_threshold
        self.aggregation = aggregation or "token_mean"
        self.entropy_bonus = entropy_bonus
        self.samples_mc_entropy = samples_mc_entropy
        self.entropy_coeff = entropy_coeff
        self.reduction = reduction or "mean"
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.kl_to_inference_coeff = kl_to_inference_coeff
        self.batch_device = None if device is None else torch.device(device)
        self.masking_strategy: MaskingStrategy = masking_strategy
        self.padding_side: Side = ref_log_prob_padding_side or padding_side
        self.ref_log_prob_padding_value = ref_log_prob_padding_value
        self.objective: Objective | ObjectiveFunction = objective
        self._objective = objective_of(objective)
        self.kl_estimator: KLEstimator = kl_estimator
        self.kl_importance_weight = kl_importance_weight
        self.dual_clip, self.delta = dual_clip, delta
        self.decoupled = decoupled
        self.tis_cap = tis_cap
        self.tis_level: Level = tis_level
        self.tis_floor = tis_floor
        self.icepop = icepop
        self.icepop_level: MaskLevel = icepop_level
        self.off_policy_threshold = off_policy_threshold
        self.top_entropy_quantile = top_entropy_quantile
        self.clip_cov, self.clip_cov_bounds = clip_cov, clip_cov_bounds
        self.sapo_tau = sapo_tau
        self.dppo, self.vespo = dppo or DPPO(), vespo or VESPO()
        self.max_completion_tokens = max_completion_tokens
        self.temperature = temperature
        self.head: Head = head
        self.chunk_size = chunk_size
        check_arguments(self, token_level=self._is_token_level())
        self._adapter: tuple[Any, Actor] | None = None
        self._set_in_keys()

    @property
    def clip_epsilon(self) -> torch.Tensor:
        """How far below and above 1 the ratio is clipped: one number if both are equal, else `[2]`."""
        bounds = sorted({self.clip_epsilon_low, self.clip_epsilon_high})
        return (
            torch.tensor(bounds[0])
            if len(bounds) == 1
            else torch.tensor([self.clip_epsilon_low, self.clip_epsilon_high])
        )

    @property
    def actor_network_params(self) -> TensorDictParams | None:
        """The actor's parameters, those that are trained; the loss has no copy of them."""
        actor = self.actor_network
        return None if actor is None else TensorDictParams(TensorDict.from_module(actor), no_convert=True)

    target_actor_network_params = actor_network_params
    """The same: nothing here is delayed behind the actor."""
    critic_network = critic_network_params = target_critic_network_params = None
    """GRPO has no critic."""

    @property
    def functional(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """False: the parameters stay in the actor."""
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
        names = self._term_names()
        names[1:1] = ["clip_fraction", "kl_approx", "ESS", "entropy"]
        return names + [name for name in self.output_type.diagnostic_names() if name not in names]

    @out_keys.setter
    def out_keys(self, value: Any) -> None:
        self._out_keys = value

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """There is no value estimator; `set_keys` only renews the input keys."""
        self._set_in_keys()

    def _is_token_level(self) -> bool:
        """Return whether the loss is a sum over tokens of functions of that token alone."""
        of_sequences = self.kl_mask_threshold or self.off_policy_threshold is not None
        return self._objective.per_token and not of_sequences and not self._is_unreduced

    @property
    def _is_unreduced(self) -> bool:
        """Whether the losses stay [B, T]."""
        return self.reduction == "none" or self.aggregation == "none"

    @property
    def chooses_tokens(self) -> bool:
        """Whether tokens are chosen from those of a whole step; see `choose_tokens`."""
        return self.top_entropy_quantile < 1 or self.clip_cov is not None

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
            DefinitionError: the entropy decides, and the actor gives none.
        """
        scored = []
        for batch in batches:
            scored_rows = self._actor().rows(batch, entropy=self.top_entropy_quantile < 1)
            scored.append(self._choice_figures(self._gather(batch, scored_rows[0].device), scored_rows))
        figures, masks = download(scored), [batch.mask.cpu() for batch in batches]
        counts = torch.cat([mask.sum(1) for mask in masks])
        order = torch.arange(len(counts)) if rows is None else torch.cat(list(rows))
        # The rows lie as they were split; a token's key is its row's place in the step, and the sort is stable.
        back = order.repeat_interleave(counts).argsort(stable=True)
        log_probs, advantage, clipped, entropy = torch.cat(figures, 1)[:, back]
        keep = top_entropy_mask(entropy, self.top_entropy_quantile)
        if self.clip_cov is not None:
            low, high = self.clip_cov_bounds
            share = self.clip_cov
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
            DefinitionError: the actor gives no entropy.
        """
        scored_rows = self._actor().rows(batch, entropy=True)
        log_probs, entropy = self._scores(scored_rows, self._gather(batch, scored_rows[0].device))
        if entropy is None:
            raise DefinitionError("learn.keep_token_figures needs an actor that gives entropies. Set it to false.")
        mask, values = batch.mask.cpu(), torch.stack([log_probs, entropy]).float().cpu()
        return torch.full((2, *mask.shape), torch.nan).masked_scatter(mask.expand(2, *mask.shape), values)

    def _scores(self, scored_rows: HeadRows | Scores, rows: TokenRows) -> Scores:
        """Return log-probs and entropies, from the head if they are not there yet."""
        if isinstance(scored_rows, Scores):
            return scored_rows
        scores = token_log_probs(
            scored_rows.hidden, scored_rows.head, rows.token, chunk_size=self.chunk_size, return_entropy=True
        )
        return Scores(*scores)

    def _choice_figures(self, rows: TokenRows, scored_rows: HeadRows | Scores) -> torch.Tensor:
        """Return log-prob, advantage, whether the clip is taken, and entropy of each token, float64 [4, N]."""
        log_probs, entropy = self._scores(scored_rows, rows)
        entropy = torch.zeros_like(log_probs) if entropy is None else entropy
        clipped = torch.zeros_like(log_probs)
        if self.clip_cov is not None:
            loss, _ = self._objective.loss(
                self._tokens(
                    log_probs, rows.advantage, rows.proximal, rows.behaviour, entropy, rows.index, rows.sequences
                )
            )
            clipped = (loss.clipped_low | loss.clipped_high).to(log_probs.dtype)
        return torch.stack([log_probs.double(), rows.advantage.double(), clipped.double(), entropy.double()])

    def _term_names(self) -> list[str]:
        """Return the names of the active loss terms, in order."""
        names = ["loss_objective"]
        names += ["loss_entropy"] if self.entropy_bonus else []
        names += ["loss_kl_to_ref"] if self.kl_to_ref_coeff else []
        return names + (["loss_kl_to_inference"] if self.kl_to_inference_coeff else [])

    def _actor(self) -> Actor:
        """Return how to score with the actor, determined once per actor."""
        if self._adapter is None or self._adapter[0] is not self.actor_network:
            actor = adapt_actor(
                self.actor_network,
                temperature=self.temperature,
                strategy=self.masking_strategy,
                samples=self.samples_mc_entropy,
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
        batch = tensordict
        if not isinstance(batch, LossBatch):
            batch = read_batch(
                batch,
                self._tensor_keys,
                masking_strategy=self.masking_strategy,
                side=self.padding_side,
                device=self.batch_device,
                decoupled=self.decoupled,
                kl_to_ref=bool(self.kl_to_ref_coeff),
            )
        if self.kl_to_ref_coeff and batch.ref is None:
            raise MissingKeyError(
                f"kl_to_ref_coeff is {self.kl_to_ref_coeff} but the batch has no {self.tensor_keys.ref_log_probs!r}. "
                "Put RetrieveLogProb on the write path, or leave the coefficient out."
            )
        if self.chooses_tokens and batch.keep is None:
            (chosen,) = self.choose_tokens([batch], seed=(int(torch.randint(2**31, ())),))
            batch = replace(batch, keep=chosen.to(batch.mask.device))
        scored_rows = self._actor().rows(batch, entropy=self.entropy_bonus or self._objective.needs_entropy)
        rows = self._gather(batch, scored_rows[0].device)
        names = self._term_names()
        if isinstance(scored_rows, HeadRows) and self._is_token_level() and self.head != "recompute":
            constants = [rows.advantage, rows.proximal, rows.behaviour, rows.weight, rows.policy_weight]
            out = fused_token_loss(  # with the gradient computed in the forward pass
                scored_rows.hidden,
                scored_rows.head,
                rows.token,
                self._weighted_terms,
                constants if rows.ref is None else [*constants, rows.ref],
                terms=len(names),
                entropy_gradient=self.entropy_bonus,
                chunk_size=self.chunk_size,
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
        names: list[str],
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return the terms from log-probs, summed or put back in [B, T]."""
        policy_weight = rows.policy_weight
        if self.off_policy_threshold is not None:
            policy_weight = policy_weight * pl.off_policy_mask(
                log_probs, rows.behaviour, rows.advantage, rows.index, rows.sequences, self.off_policy_threshold
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
        if self.kl_mask_threshold:
            keep = self._trust_region(batch, rows, log_probs.detach())
            terms = [term * keep for term in terms]
        if not self._is_unreduced:
            return {name: term.sum() for name, term in zip(names, terms, strict=True)}
        empty = torch.zeros(batch.mask.shape, device=log_probs.device, dtype=log_probs.dtype)
        at = (rows.index, rows.column)
        return {name: empty.index_put(at, term.to(empty.dtype)) for name, term in zip(names, terms, strict=True)}

    # -- the terms, on the masked tokens ----------------------------------------------------------------------

    def _gather(self, batch: LossBatch, device: torch.device) -> TokenRows:
        """Gather the masked tokens `_N` on the batch's device, and compute their weights on that of the scores.

        The values are float32, or float64 for float64 log-probs. A batch on the host causes no wait for the device.
        """
        at = row_N, column_N = batch.mask.nonzero(as_tuple=True)
        dtype = torch.promote_types(batch.behaviour.dtype, torch.float32)
        behaviour_N = batch.behaviour[at].to(dtype)
        sequences = batch.tokens.shape[0]
        if batch.weight is not None:
            weight_N = batch.weight[at].to(dtype)
        elif self._is_unreduced or self.reduction == "sum":
            weight_N = torch.ones_like(behaviour_N)
        else:
            most = self.max_completion_tokens
            weight_B = token_weights(
                batch.mask.sum(1), self.aggregation, groups=batch.group, max_completion_tokens=most, dtype=dtype
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
        if self.tis_cap is not None:
            bounds = self.tis_cap, self.tis_floor
            if self.tis_level == "token":
                factor_N = pl.tis_weight(proximal_N, behaviour_N, *bounds)
            else:
                factor_N = pl.sequence_tis_weight(proximal_N, behaviour_N, row_N, sequences, *bounds)
            policy_weight_N = policy_weight_N * factor_N
        if self.icepop is not None:
            if self.icepop_level == "token":
                ratio_N = pl.icepop_weight(proximal_N, behaviour_N, *self.icepop)
            else:
                ratio_N = pl.sequence_icepop_weight(
                    proximal_N, behaviour_N, row_N, sequences, *self.icepop, product=self.icepop_level == "product"
                )
            policy_weight_N = policy_weight_N * (ratio_N if self.tis_cap is None else ratio_N > 0)
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
        sampler = behaviour if self.kl_importance_weight else None
        return kl_loss(log_probs, reference, self.kl_estimator, behaviour=sampler)

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
        return PolicyTokens(
            log_probs=log_probs,
            proximal=proximal,
            behaviour=behaviour,
            advantage=advantage,
            index=index,
            sequences=sequences,
            entropy=entropy if self._objective.needs_entropy else None,
            mask_level=None if self.icepop is None else self.icepop_level,
            low=self.clip_epsilon_low,
            high=self.clip_epsilon_high,
            dual_clip=self.dual_clip,
            delta=self.delta,
            sapo_tau=self.sapo_tau,
            dppo=self.dppo,
            vespo=self.vespo,
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
        """Return the weighted loss terms per token, in the order of `_term_names`; each [n].

        Unless the objective is one of sequences, any part of the tokens may be passed, for example a chunk. A token
        that the policy bans (log-prob -inf) has no policy loss and no KL.
        """
        has_log_prob = torch.isfinite(log_probs.detach())
        log_probs = torch.where(has_log_prob, log_probs, proximal)
        policy_weight = torch.where(has_log_prob, policy_weight, 0.0)
        kl_weight = torch.where(has_log_prob, weight, 0.0)
        if index is not None:
            index = torch.where(has_log_prob, index, sequences)  # of a sequence of its own
        loss, _ = self._objective.loss(
            self._tokens(log_probs, advantage, proximal, behaviour, entropy, index, sequences + 1)
        )
        terms = [policy_weight * loss.loss]
        if self.entropy_bonus and entropy is not None:
            terms.append(entropy * (weight * -self.entropy_coeff))
        if self.kl_to_ref_coeff and ref is not None:
            terms.append(self._kl(log_probs, ref, behaviour) * (kl_weight * self.kl_to_ref_coeff))
        if self.kl_to_inference_coeff:
            terms.append(self._kl(log_probs, behaviour, behaviour) * (kl_weight * self.kl_to_inference_coeff))
        return terms

    def _trust_region(self, batch: LossBatch, rows: TokenRows, log_probs: torch.Tensor) -> torch.Tensor:
        """Return the factor of every token under `kl_mask_threshold`: 0 outside the region.

        If the weights come from this batch's own counts, they are computed again for the remaining tokens.
        """
        threshold = self.kl_mask_threshold or float("inf")
        keep_N = pl.kl_trust_mask(log_probs - rows.behaviour, threshold).to(log_probs.dtype)
        if batch.weight is not None or self._is_unreduced or self.reduction == "sum":
            return keep_N
        left_B = pl.indexed_sum(keep_N, rows.index, rows.sequences)
        weight_B = token_weights(
            left_B,
            self.aggregation,
            groups=None if batch.group is None else batch.group.to(left_B.device),
            max_completion_tokens=self.max_completion_tokens,
            dtype=rows.weight.dtype,
        )
        return keep_N * weight_B[rows.index] / rows.weight

    @torch.no_grad()
    def _diagnostics(self, rows: TokenRows, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> dict[str, Any]:
        """Return the diagnostics of `GRPOLossOutput` over the masked tokens, with the sums that they merge from."""
        known_N = torch.isfinite(log_probs.detach())
        lp_N = torch.where(known_N, log_probs.detach(), rows.proximal)
        index_N = torch.where(known_N, rows.index, rows.sequences)  # a banned token is of a sequence of its own
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
            "kl_to_inference": row_mean(kl_loss(lp_N, rows.behaviour, self.kl_estimator), known_N),
            "sampler_gap": row_mean((lp_N - rows.behaviour).abs(), known_N),
            **dict(zip(("num_tokens", "weight_sum", "weight_square_sum"), tokens, strict=True)),
            **dict(zip(("num_sequences", "sequence_weight_sum", "sequence_weight_square_sum"), sequences, strict=True)),
        }
        if rows.ref is not None:
            known_N = known_N & torch.isfinite(rows.ref)
            figures["kl_to_ref"] = row_mean(kl_loss(lp_N, rows.ref, self.kl_estimator), known_N)
            figures["num_ref_tokens"] = known_N.sum().double()
        return figures
