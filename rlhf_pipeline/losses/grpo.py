"""The GRPO family of losses, from hidden states to scalars without [B, T, V] logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.objectives.common import LossModule

from rlhf_pipeline.config import KLEstimator, Level, Objective
from rlhf_pipeline.data import keys
from rlhf_pipeline.data.padding import Side
from rlhf_pipeline.errors import MissingKeyError, refuse_unknown
from rlhf_pipeline.functional.fused_head import fused_token_loss
from rlhf_pipeline.functional.logprob import token_log_probs
from rlhf_pipeline.functional.policy_loss import clip_bounds
from rlhf_pipeline.losses._actors import Actor, HeadRows, Scores, adapt_actor
from rlhf_pipeline.losses._batch import LossBatch, MaskingStrategy, read_batch
from rlhf_pipeline.losses._checks import REFUSED, check_arguments
from rlhf_pipeline.losses._output import GRPOLossOutput
from rlhf_pipeline.losses._terms import (
    Head,
    TokenRows,
    diagnostics,
    gather_rows,
    is_unreduced,
    term_names,
    trust_region,
    weighted_terms,
)

__all__ = ["GRPOLoss", "GRPOLossOutput"]


class GRPOLoss(LossModule):
    """Clipped policy-gradient loss with group-relative advantages, read from a padded batch of trajectories.

    `loss = sum over tokens of weight * l`, with `l = -min(w A, clip(w, 1 - low, 1 + high) A)` and
    `w = exp(log pi - log pi_proximal)` for the default objective. DeepSeekMath, arXiv:2402.03300; DAPO's asymmetric
    clip, arXiv:2503.14476; CISPO, arXiv:2506.13585; GSPO, arXiv:2507.18071.

    Only the tokens of the loss reach the head, in chunks, so `[B, T, V]` logits never exist. With
    a `"loss_weight"` [B, T] in the batch (see `functional.aggregation.token_weights`) the weights are fixed before
    batching, and the gradient is the same for every split into micro-batches. Without it the weights come from
    this batch's own counts.

    A token with a log-prob that is not finite, of the behaviour policy, of the proximal policy where `decoupled`, or of
    the reference where the loss has a KL term against it, leaves the loss and the counts. (With `"loss_weight"` the
    caller counts, and must leave it out there.) Every ragged leaf is padded on the same side.

    Args:
        actor_network: `CausalLMPolicy` or anything with its `hidden_states`, `head_weight`, `temperature`; a
            transformers model; a TorchRL wrapper; a module with `log_probs(...)`; or one that returns logits [B, T, V].
        clip_epsilon: one number or (low, high). None is 0.2; for `cispo` there is no lower clip then.
        kl_mask_threshold: leave out tokens with `(log pi - log behaviour)^2 / 2` above this. Without `"loss_weight"`
            the tokens that are left carry the whole count, as in TorchRL; with it, the count stays.
        aggregation: `token_mean` (or `bnpo`), `sequence_mean` (or `prompt_mean`), `sequence_sum`, `dr_grpo`, or `none`.
        entropy_bonus: add `-entropy_coeff * entropy` to the loss.
        samples_mc_entropy: samples of the entropy of a TorchRL distribution that has no closed form. The entropy of a
            language model's head is exact, and needs none.
        entropy_coeff: weight of the entropy bonus.
        gamma: refused unless 1: GRPO has no discount; returns are formed on the write path.
        reduction: `mean` (by `aggregation`), `sum` (plain sum over tokens), or `none` ([B, T], weighted only by
            `"loss_weight"`).
        clip_value: refused: there is no value network.
        kl_to_ref_coeff: weight of a KL term against `("next", "ref_log_probs", "full")`. None or 0 for none.
        kl_to_inference_coeff: weight of a KL term against the behaviour log-probs.
        device: the batch's tensors are moved there; they stay where they are by default.
        masking_strategy: `rlhf`: the assistant mask. `sft`: everything after the prompt (`num_prompt_tokens` or ragged
            prompt tokens; else from the first assistant token on). `generic`: every token but the first.
        ref_log_prob_padding_side: TorchRL's name of `padding_side`; here one side serves all leaves.
        ref_log_prob_padding_value: what stands at padded positions of ragged log-probs; nothing reads it.
        objective: `grpo` (PPO's clip), `cispo` or `gspo`.
        kl_estimator: `k3+` (the value of k3, the gradient of k2, which is the right one on-policy), `k3` or `k2`. `k1`
            is refused: as a loss its expected gradient is zero.
        kl_importance_weight: multiply the KL terms by `pi / behaviour` within the clip bounds, for stale samples; see
            `functional.kl.kl_loss`.
        dual_clip: `c > 1`: where `A < 0` the loss is at most `-c A`. arXiv:1912.09729.
        delta: upper bound on `w` in the unclipped branch.
        decoupled: read proximal log-probs from `("prox_log_probs", "full")`; else the behaviour log-probs are proximal.
        tis_cap: with `decoupled`, multiply the policy loss by `min(exp(proximal - behaviour), tis_cap)`.
        tis_level: `token` or `sequence`.
        icepop: with `decoupled`, (low, high): tokens with `exp(proximal - behaviour)` outside leave the policy loss.
        icepop_level: `token`, or `sequence` for the geometric mean over the sequence.
        max_completion_tokens: the constant of `dr_grpo`; not needed where the batch has `"loss_weight"`.
        temperature: of scoring; the actor's own by default, else 1.
        head: `fused` (3 matmuls; token-level objectives), `recompute` (4 matmuls; anything), or `auto`.
        chunk_size: rows per chunk of the head.
        padding_side: where ragged leaves are padded.

    Raises:
        DefinitionError: an argument that cannot work, with the reason.

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
        gamma: float | None = None,
        reduction: str | None = None,
        clip_value: bool | float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | str | None = None,
        masking_strategy: MaskingStrategy = "rlhf",
        ref_log_prob_padding_side: Literal["left", "right"] | None = None,
        ref_log_prob_padding_value: float = 0.0,
        objective: Objective = "grpo",
        kl_estimator: KLEstimator = "k3+",
        kl_importance_weight: bool = False,
        dual_clip: float | None = None,
        delta: float | None = None,
        decoupled: bool = False,
        tis_cap: float | None = None,
        tis_level: Level = "token",
        icepop: tuple[float, float] | None = None,
        icepop_level: Level = "token",
        max_completion_tokens: int | None = None,
        temperature: float | None = None,
        head: Head = "auto",
        chunk_size: int | None = None,
        padding_side: Literal["left", "right"] = "right",
        **unknown: Any,
    ) -> None:
        known = set(GRPOLoss.__init__.__annotations__) - {"unknown", "return"}
        refuse_unknown("GRPOLoss", unknown, known, REFUSED)
        super().__init__()
        self.actor_network = actor_network
        self.clip_epsilon_low, self.clip_epsilon_high = clip_bounds(clip_epsilon, objective)
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
        self.objective: Objective = objective
        self.kl_estimator: KLEstimator = kl_estimator
        self.kl_importance_weight = kl_importance_weight
        self.dual_clip, self.delta = dual_clip, delta
        self.decoupled = decoupled
        self.tis_cap = tis_cap
        self.tis_level: Level = tis_level
        self.icepop = icepop
        self.icepop_level: Level = icepop_level
        self.max_completion_tokens = max_completion_tokens
        self.temperature = temperature
        self.head: Head = head
        self.chunk_size = chunk_size
        check_arguments(self, gamma=gamma, clip_value=clip_value, token_level=self._is_token_level())
        self._adapter: tuple[Any, Actor] | None = None
        self._set_in_keys()

    @property
    def tensor_keys(self) -> Any:
        """The keys as `set_keys` left them."""
        return self._tensor_keys

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
        found = [*(getattr(self.actor_network, "in_keys", None) or ())]
        found += [k.action, k.sample_log_prob, k.advantage, k.ref_log_probs]
        found += [k.assistant_mask, k.attention_mask]
        self._in_keys = list(dict.fromkeys(found))

    @property
    def out_keys(self) -> Any:
        """The fields of the output that this configuration fills."""
        if getattr(self, "_out_keys", None) is not None:
            return self._out_keys
        names = ["loss_objective", "clip_fraction", "kl_approx", "ESS", "entropy"]
        names += ["loss_entropy"] if self.entropy_bonus else []
        names += ["loss_kl_to_ref"] if self.kl_to_ref_coeff else []
        names += ["loss_kl_to_inference"] if self.kl_to_inference_coeff else []
        return names + [name for name in self.output_type.diagnostic_names() if name not in names]

    @out_keys.setter
    def out_keys(self, value: Any) -> None:
        self._out_keys = value

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """There is no value estimator; `set_keys` only renews the input keys."""
        self._set_in_keys()

    def _is_token_level(self) -> bool:
        """Whether the loss is a sum over tokens of functions of that token alone."""
        return self.objective != "gspo" and not self.kl_mask_threshold and not is_unreduced(self)

    def _actor(self) -> Actor:
        """How to score with the actor, found out once per actor."""
        if self._adapter is None or self._adapter[0] is not self.actor_network:
            found = adapt_actor(
                self.actor_network,
                temperature=self.temperature,
                strategy=self.masking_strategy,
                samples=self.samples_mc_entropy,
            )
            self._adapter = (self.actor_network, found)
        return self._adapter[1]

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        """Compute the loss and its diagnostics.

        Args:
            tensordict: a batch [B] with the keys of `in_keys`; it is not changed.

        Raises:
            DataError: a key is missing or a shape does not fit.
        """
        batch = read_batch(
            tensordict,
            self.tensor_keys,
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
        rows = gather_rows(self, batch)
        found = self._actor().rows(batch, tensordict, entropy=self.entropy_bonus)
        names = term_names(self)
        if isinstance(found, HeadRows) and self._is_token_level() and self.head != "recompute":
            losses, log_probs, entropy = self._fused(found, batch, rows, names)
        else:
            log_probs, entropy = found if isinstance(found, Scores) else self._scores(found, batch, rows)
            losses = self._losses(batch, rows, names, log_probs, entropy)
        fields: dict[str, Any] = {**losses, **diagnostics(self, rows, log_probs, entropy)}
        return self.output_type(**fields)

    def _fused(
        self, found: HeadRows, batch: LossBatch, rows: TokenRows, names: list[str]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """The losses with the gradient formed in the forward pass."""
        constants = [rows.advantage, rows.proximal, rows.behaviour, rows.weight, rows.policy_weight]
        out = fused_token_loss(
            found.hidden,
            found.weight,
            batch.tokens[rows.index, rows.column],
            partial(weighted_terms, self),
            constants if rows.ref is None else [*constants, rows.ref],
            terms=len(names),
            entropy_gradient=self.entropy_bonus,
            temperature=found.temperature,
            bias=found.bias,
            soft_cap=found.soft_cap,
            chunk_size=self.chunk_size,
        )
        return dict(zip(names, out.losses, strict=True)), out.log_probs, out.entropy

    def _scores(self, found: HeadRows, batch: LossBatch, rows: TokenRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the masked tokens; the logits are made again in the backward pass."""
        return token_log_probs(
            found.hidden,
            found.weight,
            batch.tokens[rows.index, rows.column],
            temperature=found.temperature,
            bias=found.bias,
            soft_cap=found.soft_cap,
            chunk_size=self.chunk_size,
            return_entropy=True,
        )

    def _losses(
        self,
        batch: LossBatch,
        rows: TokenRows,
        names: list[str],
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """The terms from log-probs, summed, or put back in [B, T]."""
        terms = weighted_terms(
            self,
            log_probs,
            entropy,
            rows.advantage,
            rows.proximal,
            rows.behaviour,
            rows.weight,
            rows.policy_weight,
            rows.ref,
            index=rows.index,
            sequences=rows.sequences,
        )
        if self.kl_mask_threshold:
            keep = trust_region(self, batch, rows, log_probs.detach())
            terms = [term * keep for term in terms]
        if not is_unreduced(self):
            return {name: term.sum() for name, term in zip(names, terms, strict=True)}
        empty = torch.zeros(batch.mask.shape, device=log_probs.device, dtype=log_probs.dtype)
        at = (rows.index, rows.column)
        return {name: empty.index_put(at, term.to(empty.dtype)) for name, term in zip(names, terms, strict=True)}
