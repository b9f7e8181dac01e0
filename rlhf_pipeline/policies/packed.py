"""Scoring layouts: how the rows of a step are cut into micro-batches, and how a batch goes through the model.

* `padded`: right-padded rows, sorted by length. Works for every model, and what the others fall back to.
* `packed`: rows laid end to end without padding, attention cut into segments.
* `prefix_shared`: packed, and the tokens that rows have in common at their start, a group's prompt, computed once;
  their gradient flows through the shared tokens.

A layout changes cost, never the result: log-probs and gradients agree to rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.functional.head import token_log_probs
from rlhf_pipeline.policies._packed_attention import ARGUMENT, PackedUnsupported, packed_rows_running
from rlhf_pipeline.policies._packing import pack
from rlhf_pipeline.policies._scoring import ScoringRows, predicting_rows, scored_positions
from rlhf_pipeline.policies.model_parts import ModelParts, rounding

__all__ = ["LAYOUTS", "Layout", "LayoutScorer", "MicroBatches", "check_layout", "plan_batches", "plan_micro_batches"]

Layout = Literal["padded", "packed", "prefix_shared"]
LAYOUTS: Final[tuple[Layout, ...]] = get_args(Layout)

_CHECKED_ROWS = 3
_CHECKED_TOKENS = 256


def check_layout(name: str) -> Layout:
    """Return the layout of this name.

    Raises:
        DefinitionError: there is none.

    >>> check_layout("packed")
    'packed'
    """
    if name not in LAYOUTS:
        raise DefinitionError(f"unknown layout {name!r}.{did_you_mean(name, LAYOUTS)}")
    return cast(Layout, name)


def plan_batches(
    lengths: torch.Tensor | Sequence[int],
    token_budget: int,
    *,
    max_rows: int | None = None,
    multiple_of: int = 1,
    batch_overhead: int | None = None,
) -> list[torch.Tensor]:
    """Cut rows into micro-batches of similar length whose padded size stays within a budget.

    Rows are sorted by length, longest first (so the largest batch comes first and memory does not creep), and cut
    where the total cost is least: padded tokens plus an overhead per micro-batch, by dynamic programming. Filling
    each batch to the budget instead left 17 to 26 % of the positions padding on 64 log-normal lengths; this leaves
    about 10 % with two or three micro-batches more, and 4 % at 512 lengths. Ties keep their order, so the plan is a
    pure function of the lengths. It takes 0.1 s for 4096 rows.

    Args:
        lengths: [N].
        token_budget: the largest `rows * padded length` of a micro-batch.
        max_rows: the largest number of rows of a micro-batch.
        multiple_of: padded lengths are rounded up to a multiple of this.
        batch_overhead: how many tokens one more micro-batch costs; a sixteenth of the budget by default. Larger
            means fewer batches with more padding.

    Returns:
        int64 index tensors that together hold each row once.

    Raises:
        DefinitionError: a row alone is above the budget, or an impossible budget.

    >>> [b.tolist() for b in plan_batches([50, 20, 60, 10], 120, batch_overhead=20)]
    [[2, 0], [1, 3]]
    """
    if token_budget < 1 or (max_rows is not None and max_rows < 1):
        raise DefinitionError(f"token_budget and max_rows must be 1 or more; got {token_budget} and {max_rows}.")
    if multiple_of < 1:
        raise DefinitionError(f"multiple_of must be 1 or more; got {multiple_of}.")
    sizes = np.asarray(lengths.tolist() if isinstance(lengths, torch.Tensor) else lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    width = np.maximum(-(-sizes[order] // multiple_of) * multiple_of, 1)
    count = len(order)
    if count and width[0] > token_budget:
        raise DefinitionError(
            f"row {order[0]} has {sizes[order[0]]} tokens (padded {width[0]}), above the token "
            f"budget of {token_budget}. Raise the budget to at least {width[0]}."
        )
    overhead = token_budget / 16 if batch_overhead is None else batch_overhead
    limit = max_rows or count
    if 0 < count <= limit:
        whole = count * int(width[0])
        if whole <= token_budget and whole - int(width.sum()) < overhead:
            return [torch.from_numpy(order)]  # one more batch costs more than all the padding there is
    cost = np.zeros(count + 1)
    cut = np.zeros(count, dtype=np.int64)
    for i in range(count - 1, -1, -1):
        rows = min(token_budget // int(width[i]), limit, count - i)
        choices = np.arange(1, rows + 1) * width[i] + cost[i + 1 : i + rows + 1]
        best = int(choices.argmin())
        cost[i], cut[i] = choices[best] + overhead, i + 1 + best
    plan: list[torch.Tensor] = []
    start = 0
    while start < count:
        end = int(cut[start])
        plan.append(torch.from_numpy(order[start:end].copy()))
        start = end
    return plan


class MicroBatches(NamedTuple):
    """What `plan_micro_batches` returns.

    Attributes:
        rows: int64 tensors that together hold each row once; members of a group stand side by side.
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
) -> MicroBatches:
    """Cut the rows of a step into micro-batches that each compute at most `token_budget` positions.

    `padded` is `plan_batches`. `packed` fills micro-batches with rows, `prefix_shared` with whole groups, the
    largest first, each into the first micro-batch with room; a group above the budget is cut, and each part computes
    the prompt. The plan is a pure function of its arguments.

    Args:
        layout: one of `LAYOUTS`.
        lengths: [N], tokens of each row, prompt included.
        token_budget: the most positions of a micro-batch.
        prompt_lengths: [N], tokens of each row that its group has in common; for `prefix_shared`.
        group_ids: [N], the group of each row; for `prefix_shared`.

    Raises:
        DefinitionError: unknown layout, a row alone is above the budget, or what `prefix_shared` needs is missing.

    >>> plan = plan_micro_batches("prefix_shared", [9, 8, 9], 12, prompt_lengths=[7, 7, 7], group_ids=[0, 1, 0])
    >>> [rows.tolist() for rows in plan.rows], plan.positions
    ([[0, 2], [1]], [11, 8])
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if layout == "padded":
        rows = plan_batches(torch.from_numpy(sizes), token_budget)
        return MicroBatches(rows, [len(batch) * int(sizes[batch.numpy()].max()) for batch in rows])
    if len(sizes) and int(sizes.max()) > token_budget:
        row = int(sizes.argmax())
        raise DefinitionError(
            f"row {row} has {sizes[row]} tokens, above the token budget of {token_budget}. Raise the budget to at "
            f"least {sizes[row]}."
        )
    if check_layout(layout) == "packed":
        items = [([row], int(size)) for row, size in enumerate(sizes.tolist())]
    else:
        if prompt_lengths is None or group_ids is None:
            raise DefinitionError("layout 'prefix_shared' needs prompt_lengths and group_ids; or use 'packed'.")
        items = _group_items(sizes, np.asarray(prompt_lengths), np.asarray(group_ids), token_budget)
    bins = _first_fit(items, token_budget)
    return MicroBatches([torch.tensor(rows) for rows, _ in bins], [size for _, size in bins])


def _group_items(
    sizes: np.ndarray, prompts: np.ndarray, groups: np.ndarray, budget: int
) -> list[tuple[list[int], int]]:
    """Whole groups with their cost, cut where a group alone is above the budget."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        members.setdefault(group, []).append(row)
    items: list[tuple[list[int], int]] = []
    for rows in members.values():
        prompt = int(min(prompts[rows].min(), sizes[rows].min()))
        held, cost = [], prompt
        for row in rows:
            own = int(sizes[row]) - prompt
            if held and cost + own > budget:
                items.append((held, cost))
                held, cost = [], prompt
            held, cost = [*held, row], cost + own
        items.append((held, cost))
    return items


def _first_fit(items: list[tuple[list[int], int]], budget: int) -> list[tuple[list[int], int]]:
    """Put each item, the largest first, into the first bin with room."""
    bins: list[tuple[list[int], int]] = []
    for rows, cost in sorted(items, key=lambda item: -item[1]):
        for i, (held, size) in enumerate(bins):
            if size + cost <= budget:
                bins[i] = ([*held, *rows], size + cost)
                break
        else:
            bins.append((rows, cost))
    return bins


class LayoutScorer:
    """Runs batches through a model in one layout, and falls back to padding where the model does not allow it.

    The first batch with several rows, and the first with a shared prefix, is compared with padding: a model whose
    layers see across rows, or place tokens in another way, is found out by its log-probs. A model that fails stays
    padded; a batch that does not fit (rows longer than a sliding window) is padded alone. Either way the result is
    right, and `take_notices` says what happened.

    Args:
        layout: one of `LAYOUTS`.

    Raises:
        DefinitionError: unknown layout.

    >>> LayoutScorer("packed").in_use
    'packed'
    """

    def __init__(self, layout: str = "padded") -> None:
        self.layout: Layout = check_layout(layout)
        self.in_use: Layout = self.layout
        self._checked: set[str] = set()
        self._notices: list[str] = []
        self._noted: set[str] = set()

    def take_notices(self) -> list[str]:
        """Return what a person should know about the layout since the last call, and forget it."""
        notices, self._notices = self._notices, []
        return notices

    def rows(
        self, parts: ModelParts, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None
    ) -> ScoringRows:
        """Return the hidden states that predict the scored tokens; as `CausalLMPolicy.scoring_rows`."""
        if self.in_use == "padded":
            return predicting_rows(parts, input_ids, attention_mask, score_mask)
        try:
            found, kinds = self._packed(parts, input_ids, attention_mask, score_mask)
        except PackedUnsupported as reason:
            self._note(f"layout {self.layout!r} does not fit this model: {reason}. Such rows are padded instead.")
            return self._padded(parts, input_ids, attention_mask, score_mask)
        if kinds - self._checked:
            error, allowed = self._compare(parts, found, input_ids, attention_mask)
            if not error <= allowed:
                self.in_use = "padded"
                self._note(
                    f"layout {self.layout!r} does not fit this model: log-probs differ from padded rows by {error:.1e} "
                    f"(at most {allowed:.1e} is rounding). Rows are padded from now on."
                )
                return self._padded(parts, input_ids, attention_mask, score_mask)
            self._checked |= kinds
        return found

    def _note(self, text: str) -> None:
        # One line per kind of reason: the lengths of rows differ from batch to batch.
        kind = "".join(c for c in text if not c.isdigit())
        if kind not in self._noted:
            self._noted.add(kind)
            self._notices.append(text)

    def _packed(
        self, parts: ModelParts, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None
    ) -> tuple[ScoringRows, set[str]]:
        """The rows by the packed path, and what there was to go wrong in it."""
        config = _packable_config(parts)
        mask, positions, scored = scored_positions(parts, input_ids, attention_mask, score_mask)
        ids = input_ids.to(mask.device)
        packing = pack(ids, positions, scored, share_prefix=self.in_use == "prefix_shared")
        rows, columns = scored.nonzero(as_tuple=True)
        if not packing.rows:
            return predicting_rows(parts, input_ids, attention_mask, score_mask), set()
        window = _smallest_window(config)
        if window is not None and packing.segments.longest > window:
            raise PackedUnsupported(
                f"its attention has a window of {window} and a row has {packing.segments.longest} tokens"
            )
        with packed_rows_running(config):
            hidden = parts.hidden(
                input_ids=packing.input_ids[None],
                position_ids=packing.position_ids[None],
                use_cache=False,
                **{ARGUMENT: packing.segments},
            )[0]
        if packing.segments.calls < parts.num_layers:
            raise PackedUnsupported(
                f"{packing.segments.calls} of its {parts.num_layers} layers use the attention function that was set"
            )
        kinds = {"rows"} if packing.rows > 1 else set()
        if packing.segments.has_prefix:
            kinds.add("prefix")
        return ScoringRows(hidden.index_select(0, packing.predicting), ids[rows, columns].long(), rows, columns), kinds

    def _padded(
        self, parts: ModelParts, input_ids: Tensor, attention_mask: Tensor, score_mask: Tensor | None
    ) -> ScoringRows:
        """Padded rows in parts of similar length, because the batch was planned for another layout."""
        mask = attention_mask.bool()
        lengths = mask.sum(1).cpu().clamp_min(1)
        batches = plan_batches(lengths, max(int(lengths.sum()), 1))
        if len(batches) < 2:
            return predicting_rows(parts, input_ids, attention_mask, score_mask)
        parted: list[ScoringRows] = []
        for batch in batches:
            at = batch.to(input_ids.device)
            score = None if score_mask is None else score_mask[at]
            found = predicting_rows(parts, input_ids[at], attention_mask[at], score)
            parted.append(found._replace(rows=batch.to(found.rows.device)[found.rows]))
        hidden, targets, rows, columns = (torch.cat(list(x)) for x in zip(*parted, strict=True))
        order = (rows * input_ids.shape[1] + columns).argsort()
        return ScoringRows(hidden[order], targets[order], rows[order], columns[order])

    @torch.no_grad()
    def _compare(
        self, parts: ModelParts, found: ScoringRows, input_ids: Tensor, attention_mask: Tensor
    ) -> tuple[float, float]:
        """How far the log-probs of a few rows are from those of the same rows padded, and how far they may be."""
        present = found.rows.unique()
        picked = present[torch.linspace(0, len(present) - 1, _CHECKED_ROWS).round().long().unique()]
        worst, weight = 0.0, parts.head.weight
        for row in picked.tolist():
            at = (found.rows == row).nonzero()[:, 0][-_CHECKED_TOKENS:]
            score = torch.zeros(1, input_ids.shape[1], dtype=torch.bool, device=found.rows.device)
            score[0, found.columns[at]] = True
            alone = predicting_rows(parts, input_ids[row, None], attention_mask[row, None], score)
            one, other = (
                token_log_probs(
                    hidden.detach(), weight, found.targets[at], bias=parts.head.bias, soft_cap=parts.soft_cap
                )
                for hidden in (found.hidden[at], alone.hidden)
            )
            worst = max(worst, float((one - other).abs().mean()))
        return worst, rounding(weight, fine=2e-5, coarse=2e-2)


def _packable_config(parts: ModelParts) -> Any:
    """The config of the trunk, if its attention can be replaced.

    Raises:
        PackedUnsupported: it cannot.
    """
    trunk: Any = parts.trunk
    if not getattr(trunk, "_supports_attention_backend", False):
        raise PackedUnsupported("its attention is its own")
    parameters = inspect.signature(trunk.forward).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        raise PackedUnsupported("its forward pass takes no further arguments")
    config = trunk.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise PackedUnsupported(f"it has layers of the kind {', '.join(sorted(kinds))}")
    return config


def _smallest_window(config: Any) -> int | None:
    """The window of layers with sliding attention, or None."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return None
    return int(window)
