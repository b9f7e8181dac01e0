"""Scoring layouts: how the rows of a step are cut into micro-batches, and how a batch goes through the model.

* `padded`: right-padded rows, sorted by length. Works for every model; the other layouts fall back to it.
* `packed`: rows laid end to end without padding, attention cut into segments.
* `prefix_shared`: packed, and a common prefix of rows, such as a group's prompt, computed once; gradients flow through
  the shared tokens.
* `auto`: `prefix_shared` where that costs less than padding (`layout_costs`) and the model allows it, otherwise
  `padded`.

A layout changes cost, never the result: log-probs and gradients agree to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.data.upload import upload
from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.functional.head import Head, token_log_probs
from rlhf_pipeline.policies._packed_attention import (
    ARGUMENT,
    PackedUnsupported,
)
from rlhf_pipeline.policies._packing import MIN_SHARED_TOKENS, Packing, pack
from rlhf_pipeline.policies._scoring import HostBatch, ScoringRows, hidden_of_rows, host_batch, predicting_rows
from rlhf_pipeline.policies.attention import packed_rows_running
from rlhf_pipeline.policies.attention_name import implementation_of
from rlhf_pipeline.policies.layout_costs import costs_on, sharing_pays
from rlhf_pipeline.policies.model_parts import ModelParts, rounding

__all__ = ["LAYOUTS", "Layout", "LayoutScorer", "MicroBatches", "check_layout", "plan_batches", "plan_micro_batches"]

Layout = Literal["auto", "padded", "packed", "prefix_shared"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)
TokenRows = tuple[Tensor, Tensor, Tensor | None]
"""Token ids, attention mask and score mask of a batch, each `[B, T]`; see `TokenPolicy.log_probs`."""

_CHECKED_ROWS = 3
_CHECKED_TOKENS = 256
_HALF_PRECISION_GAP = 0.2
"""The largest mean difference of log-probs between two layouts that half precision explains, in nats.

Two correct layouts of SmolLM2-135M in bfloat16 differed by 0.019 to 0.060 a token in five batches of one rollout. A
bound of 0.02 let the first batch of a process determine randomly which layout all its steps used: a resumed run on an
H200 computed different last bits, and used a different amount of memory, than before. Attention across rows changes
the log-probs of a trained model by more than this bound.
"""


def check_layout(name: str) -> Layout:
    """Return the layout of this name.

    >>> check_layout("packed")
    'packed'
    """
    if name not in LAYOUTS:
        raise DefinitionError(f"unknown layout {name!r}.{did_you_mean(name, LAYOUTS)}")
    return cast(Layout, name)


def plan_batches(lengths: torch.Tensor | Sequence[int], token_budget: int) -> list[torch.Tensor]:
    """Cut rows into micro-batches of similar length whose padded size stays within a budget.

    Rows are sorted by length, longest first (so the largest batch comes first and memory does not creep), and cut
    where the total cost is least: padded tokens plus a sixteenth of the budget per micro-batch, by dynamic
    programming. Filling each batch to the budget instead left 17 to 26 % of the positions padding on 64 log-normal
    lengths; this leaves about 10 % with two or three micro-batches more, and 4 % at 512 lengths. Ties keep their order,
    so the plan is a pure function of the lengths. It takes 0.1 s for 4096 rows.

    Args:
        lengths: [N].
        token_budget: the largest `rows * padded length` of a micro-batch. A longer row is a micro-batch by itself.

    Returns:
        int64 index tensors that together hold each row once.

    >>> [b.tolist() for b in plan_batches([58, 20, 60, 19], 120)]
    [[2, 0], [1, 3]]
    """
    if token_budget < 1:
        raise DefinitionError(f"token_budget is {token_budget}; it must be at least 1.")
    sizes = np.asarray(lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    longer = int((sizes > token_budget).sum())
    if longer:
        plan = plan_batches(sizes[order[longer:]].tolist(), token_budget)
        rest = order[longer:]
        return [*torch.from_numpy(order[:longer]).split(1), *(torch.from_numpy(rest[at.numpy()]) for at in plan)]
    width = np.maximum(sizes[order], 1)
    count = len(order)
    overhead = token_budget / 16
    if count:
        whole = count * int(width[0])
        if whole <= token_budget and whole - int(width.sum()) < overhead:
            return [torch.from_numpy(order)]  # one more batch would cost more than all the padding
    cost, cut, steps = np.zeros(count + 1), [0] * count, np.arange(1, count + 1)
    widths = width.tolist()
    for i in range(count - 1, -1, -1):
        rows = min(token_budget // widths[i], count - i)
        choices = steps[:rows] * widths[i] + cost[i + 1 : i + rows + 1]
        best = int(choices.argmin())
        cost[i], cut[i] = choices[best] + overhead, i + 1 + best
    plan: list[torch.Tensor] = []
    start = 0
    while start < count:
        end = cut[start]
        plan.append(torch.from_numpy(order[start:end].copy()))
        start = end
    return plan


class MicroBatches(NamedTuple):
    """The return value of `plan_micro_batches`.

    Attributes:
        rows: int64 tensors that together hold each row once; members of a group are adjacent.
        positions: how many positions the model computes for each micro-batch, padding included and shared prompts
            counted once.
    """

    rows: list[Tensor]
    positions: list[int]


def plan_micro_batches(
    layout: str,
    lengths: Tensor | Sequence[int],
    token_budget: int,
    *,
    prompt_lengths: Tensor | Sequence[int] | None = None,
    group_ids: Tensor | Sequence[int] | None = None,
    weight: Tensor | None = None,
) -> MicroBatches:
    """Cut the rows of a step into micro-batches that each compute at most `token_budget` positions.

    `padded` is `plan_batches`. `packed` fills micro-batches with rows, `prefix_shared` with whole groups, the
    largest first, each into the first micro-batch with room; a group above the budget is cut, and each part computes
    the prompt. `auto` is the cheaper of `padded` and `prefix_shared`. The plan is a pure function of its arguments.

    Args:
        layout: one of `LAYOUTS`.
        lengths: [N], tokens of each row, prompt included.
        token_budget: the most positions of a micro-batch. A longer row is a micro-batch by itself.
        prompt_lengths: [N], tokens of each row that its group has in common; for `prefix_shared` and `auto`.
        group_ids: [N], the group of each row; for `prefix_shared` and `auto`.
        weight: of the model's head, for `auto`.

    >>> plan = plan_micro_batches("prefix_shared", [10, 9, 10], 13, prompt_lengths=[8, 8, 8], group_ids=[0, 1, 0])
    >>> [rows.tolist() for rows in plan.rows], plan.positions
    ([[0, 2], [1]], [12, 9])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if layout == "auto":
        if weight is None:
            raise DefinitionError("layout 'auto' needs the weight of the head. Pass weight=, or choose another layout.")
        pays = partial(sharing_pays, costs_on(weight), width=int(weight.shape[1]))
        padded = plan_micro_batches("padded", lengths, token_budget)
        if not pays(padded=sum(padded.positions), packed=0, segments=len(sizes)):
            return padded
        shared = plan_micro_batches(
            "prefix_shared", lengths, token_budget, prompt_lengths=prompt_lengths, group_ids=group_ids
        )
        segments = len(sizes) + len(np.unique(np.asarray(group_ids)))
        pays_here = pays(padded=sum(padded.positions), packed=sum(shared.positions), segments=segments)
        return shared if pays_here else padded
    if layout == "padded":
        rows = plan_batches(torch.from_numpy(sizes), token_budget)
        return MicroBatches(rows, [len(batch) * int(sizes[batch.numpy()].max()) for batch in rows])
    if check_layout(layout) == "packed":
        items = [([row], int(size)) for row, size in enumerate(sizes.tolist())]
    else:
        if prompt_lengths is None or group_ids is None:
            raise DefinitionError(
                "layout 'prefix_shared' needs prompt_lengths and group_ids. Pass them, or use layout 'packed'."
            )
        items = _group_items(sizes, np.asarray(prompt_lengths), np.asarray(group_ids), token_budget)
    bins = _first_fit(items, token_budget)
    return MicroBatches([torch.tensor(rows) for rows, _ in bins], [size for _, size in bins])


def _group_items(
    sizes: np.ndarray, prompts: np.ndarray, groups: np.ndarray, budget: int
) -> list[tuple[list[int], int]]:
    """Return whole groups with their cost; a group above the budget is cut."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    items: list[tuple[list[int], int]] = []
    for rows in members.values():
        prompt = int(min(prompts[rows].min(), sizes[rows].min()))
        if prompt < MIN_SHARED_TOKENS:
            items += [([row], int(sizes[row])) for row in rows]
            continue
        item_rows, cost = [], prompt
        for row in rows:
            suffix = int(sizes[row]) - prompt
            if item_rows and cost + suffix > budget:
                items.append((item_rows, cost))
                item_rows, cost = [], prompt
            item_rows, cost = [*item_rows, row], cost + suffix
        items.append((item_rows, cost))
    return items


def _first_fit(items: list[tuple[list[int], int]], budget: int) -> list[tuple[list[int], int]]:
    """Put each item, the largest first, into the first bin with room."""
    bins: list[tuple[list[int], int]] = []
    for rows, cost in sorted(items, key=lambda item: -item[1]):
        for i, (bin_rows, size) in enumerate(bins):
            if size + cost <= budget:
                bins[i] = ([*bin_rows, *rows], size + cost)
                break
        else:
            bins.append((rows, cost))
    return bins


class Arrangement(NamedTuple):
    """How one batch goes through a model; the host decides it before the model runs.

    Attributes:
        packing: rows laid end to end; None for padded rows.
        parts: the batch rows of each padded forward pass; none with a packing.
        positions: how many positions the model computes, padding included.
    """

    packing: Packing | None
    parts: list[Tensor]
    positions: int


class LayoutScorer:
    """Runs batches through a model in one layout, and falls back to padding where the model does not allow it.

    The first batch with several rows, and the first with a shared prefix, is compared with padding: log-probs reveal a
    model whose layers attend across rows or position tokens differently. A model that fails is padded from then on; a
    batch that does not fit (rows longer than a sliding window) is padded by itself. The result is right either way, and
    `take_notices` returns the reason.

    >>> LayoutScorer("packed").in_use
    'packed'
    """

    def __init__(self, layout: str = "padded") -> None:
        self.layout: Layout = check_layout(layout)
        self.in_use: Layout = self.layout
        self._checked: set[str] = set()
        self._notices: list[str] = []
        self._noted: set[str] = set()
        self._computed: set[tuple[str, str]] = set()

    def planned(self, parts: ModelParts) -> Layout:
        """Return the layout to plan micro-batches for: `padded` for a model that supports no other."""
        if self.in_use != "padded":
            try:
                _check_packable(parts)
            except PackedUnsupported as reason:
                # Users of recurrent models pay for each member's prompt.
                self._pad_from_now_on(str(reason), is_chosen=parts.num_states > 0)
        return self.in_use

    def positions(self, parts: ModelParts, batches: Sequence[TokenRows], token_budget: int) -> list[int]:
        """Return how many positions the model computes for each batch.

        All checks that could change the layout run first, so scoring one of these batches computes no more than this.

        Args:
            parts: of the model.
            batches: token ids, attention mask and score mask of each, as for `rows`.
            token_budget: the most positions of a batch that is computed for a check.
        """
        on_host = [host_batch(parts, *rows) for rows in batches]
        with torch.no_grad():
            for batch in on_host:
                packing, _, positions = self._arranged(parts, batch)
                if packing is not None and positions <= token_budget and _features(packing) - self._checked:
                    self._checked_packed(parts, batch, packing)
        return [self._arranged(parts, batch).positions for batch in on_host]

    def take_notices(self) -> list[str]:
        """Return the notices about the layout since the last call, and clear them."""
        notices, self._notices = self._notices, []
        return notices

    def take_computed(self) -> set[tuple[str, str]]:
        """Return the layouts of the batches since the last call, each with its attention kernel, and clear them."""
        computed, self._computed = self._computed, set()
        return computed

    def rows(
        self, parts: ModelParts, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None
    ) -> ScoringRows:
        """Return the hidden states that predict the scored tokens; as `CausalLMPolicy.scoring_rows`."""
        return self._scored(parts, host_batch(parts, input_ids, attention_mask, score_mask))

    def _scored(self, parts: ModelParts, batch: HostBatch) -> ScoringRows:
        packing, padded_parts, _ = self._arranged(parts, batch)
        if packing is not None:
            scored = self._checked_packed(parts, batch, packing)
            if scored is not None:
                name = "prefix_shared" if packing.segments.has_prefix else "packed"
                self._computed.add((name, packing.segments.kernel))
                return scored
            padded_parts = self._arranged(parts, batch).parts
        self._computed.add(("padded", implementation_of(parts.trunk.config) or "none"))
        return _padded(parts, batch, padded_parts)

    def _checked_packed(self, parts: ModelParts, batch: HostBatch, packing: Packing) -> ScoringRows | None:
        """Score rows laid end to end; None if the model fails a check, and is padded from now on."""
        try:
            scored = _packed(parts, batch, packing)
        except PackedUnsupported as reason:
            self._pad_from_now_on(str(reason))
            return None
        features = _features(packing)
        if features - self._checked:
            error, allowed = _compare(parts, scored, batch)
            if not error <= allowed:
                self._pad_from_now_on(
                    f"log-probs differ from those of padded rows by {error:.1e} (rounding explains at most "
                    f"{allowed:.1e})",
                    is_chosen=True,
                )
                return None
            self._checked |= features
        return scored

    def _pad_from_now_on(self, reason: str, *, is_chosen: bool = False) -> None:
        self.in_use = "padded"
        text = f"layout {self.layout!r} is not suitable for this model: {reason}. Rows are padded from this step on."
        self._note(text, is_chosen=is_chosen)

    def _note(self, text: str, *, is_chosen: bool = False) -> None:
        # `auto` pads a model that cannot be packed without a notice. A layout that it has chosen and that fails is
        # reported.
        if self.layout == "auto" and not is_chosen:
            return
        # One notice per kind of reason: the lengths of rows differ from batch to batch.
        kind = "".join(c for c in text if not c.isdigit())
        if kind not in self._noted:
            self._noted.add(kind)
            self._notices.append(text)

    def _arranged(self, parts: ModelParts, batch: HostBatch) -> Arrangement:
        """Decide how a batch goes through the model."""
        lengths = batch.real.sum(1)
        padded = len(batch.ids) * max(int(lengths.max(initial=0)), 1)
        together = Arrangement(None, [torch.arange(len(batch.ids))], padded)
        if self.planned(parts) == "padded":
            return together
        weight, auto = parts.head.weight, self.in_use == "auto"
        pays = partial(sharing_pays, costs_on(weight), width=int(weight.shape[1]), padded=padded)
        if auto and not pays(packed=0, segments=len(batch.ids)):
            return together  # too short for a segment each to pay, whatever they share
        packing = pack(batch, share_prefix=self.in_use != "packed")
        if not packing.rows:
            return together
        packed, segments, window = len(packing.input_ids), packing.segments, _smallest_window(parts.trunk.config)
        if window is not None and segments.longest > window:
            self._note(
                f"layout {self.layout!r} is not suitable for this model: its attention has a window of {window} and a "
                f"row has {segments.longest} tokens. These rows are padded instead."
            )
        elif not auto or pays(packed=packed, segments=len(segments.starts)):
            return Arrangement(packing, [], packed)
        # Padded in parts of similar length, because the batch was planned for another layout.
        sizes = lengths.clip(1)
        planned = plan_batches(torch.from_numpy(sizes), max(int(sizes.sum()), 1))
        return Arrangement(None, planned, sum(len(rows) * int(sizes[rows.numpy()].max()) for rows in planned))


def _features(packing: Packing) -> set[str]:
    """Return what a packing needs of a model and a comparison with padding checks: "rows", "prefix"."""
    features = {"rows"} if packing.rows > 1 else set[str]()
    return features | {"prefix"} if packing.segments.has_prefix else features


def _packed(parts: ModelParts, batch: HostBatch, packing: Packing) -> ScoringRows:
    """Score rows laid end to end."""
    rows, columns = np.nonzero(batch.scored)
    arrays = (packing.input_ids, packing.position_ids, packing.predicting, batch.ids[rows, columns], rows, columns)
    on_device = upload([*map(torch.from_numpy, arrays)], parts.head.weight.device)
    segments = packing.segments
    with packed_rows_running(parts.trunk.config):
        hidden = hidden_of_rows(parts, on_device[0][None], on_device[1][None], **{ARGUMENT: segments})[0]
    if segments.calls < parts.num_layers:
        raise PackedUnsupported(
            f"only {segments.calls} of its {parts.num_layers} layers use the attention function for packed rows"
        )
    return ScoringRows(hidden.index_select(0, on_device[2]), *on_device[3:])


def _padded(parts: ModelParts, batch: HostBatch, planned: Sequence[Tensor]) -> ScoringRows:
    """Score padded rows, in one forward pass for each of these parts of the batch."""
    if len(planned) < 2:
        return predicting_rows(parts, batch)
    parted = [predicting_rows(parts, batch.select(rows.numpy())) for rows in planned]
    # Back into row-major order: the parts hold whole rows.
    counts = batch.scored.sum(1)
    order = np.concatenate([rows.numpy() for rows in planned])
    starts = np.cumsum(counts) - counts
    at = np.argsort(np.concatenate([np.arange(starts[row], starts[row] + counts[row]) for row in order]))
    rows, columns = np.nonzero(batch.scored)
    targets = batch.ids[rows, columns]
    on_device = upload([*map(torch.from_numpy, (at, targets, rows, columns))], parts.head.weight.device)
    return ScoringRows(torch.cat([part.hidden for part in parted]).index_select(0, on_device[0]), *on_device[1:])


@torch.no_grad()
def _compare(parts: ModelParts, scored: ScoringRows, batch: HostBatch) -> tuple[float, float]:
    """Return how far the log-probs of a few rows are from those of the rows padded, a mean, and the tolerance."""
    present = np.flatnonzero(batch.scored.any(1))
    picked = np.unique(np.linspace(0, len(present) - 1, _CHECKED_ROWS).round().astype(np.int64))
    weight = parts.head.weight
    gaps: list[Tensor] = []
    of_row = scored.rows.cpu().numpy()
    for row in present[picked]:
        at = torch.from_numpy(np.flatnonzero(of_row == row)[-_CHECKED_TOKENS:]).to(weight.device)
        alone = predicting_rows(parts, batch.select(np.array([row])))
        together, separate = (
            token_log_probs(hidden.detach(), Head(weight, parts.head.bias, soft_cap=parts.soft_cap), scored.targets[at])
            for hidden in (scored.hidden[at], alone.hidden[-len(at) :])
        )
        gaps.append((together - separate).abs())
    return float(torch.cat(gaps).mean()) if gaps else 0.0, rounding(weight, fine=2e-5, coarse=_HALF_PRECISION_GAP)


def _check_packable(parts: ModelParts) -> None:
    """Raise PackedUnsupported if a model's config or signature already shows that its rows cannot be packed."""
    trunk: Any = parts.trunk
    kinds = set(getattr(trunk.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise PackedUnsupported(f"it has layers of type {' and '.join(sorted(kinds))}")
    if not getattr(trunk, "_supports_attention_backend", False):
        raise PackedUnsupported("its attention is custom")
    parameters = inspect.signature(trunk.forward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise PackedUnsupported("its forward pass accepts no additional arguments")


def _smallest_window(config: Any) -> int | None:
    """Return the window of layers with sliding attention, or None."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return int(window)
