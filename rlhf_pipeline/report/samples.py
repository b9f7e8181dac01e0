"""Trajectories picked from the store for display."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.data.prompts import JsonValue
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.report.tokens import TokenTexts
from rlhf_pipeline.report.words import number, one_line
from rlhf_pipeline.run.folder import RunFolder

_TIES = 64
_WHOLES = ("group_id", "trajectory_id", "policy_version", "newest_policy_version", "use_count")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One trajectory with all its stored values; None if the store has no such column."""

    id: int
    prompt: str
    completion: str
    answer: str | None
    error: str | None
    """Why its reward call failed, or None."""
    reward: float | None
    advantage: float | None
    group_id: int | None
    trajectory_id: int | None
    policy_version: int | None
    newest_policy_version: int | None
    """None also if one version sampled all of it, as is then `version_spans` empty."""
    version_spans: tuple[tuple[int, int], ...]
    """The place of the first token of each span, and the version of its weights."""
    engine: str
    temperature: float | None
    log_prob_mode: str
    finish_reason: str
    use_count: int | None
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    """[T], prompt first."""
    pieces: tuple[str, ...]
    """The text of each token, [T]."""
    mask: tuple[bool, ...]
    """True where the policy produced the token, [T]."""
    log_probs: tuple[float | None, ...]
    """Log-probs of the behaviour policy, [T]; None where no score exists."""
    ref_log_probs: tuple[float | None, ...] | None
    """Log-probs of the reference policy, [T], or None if none were stored."""


def read_trajectories(stored: Stored, ids: Ids, texts: TokenTexts) -> list[Trajectory]:
    """Read all values of the given trajectories.

    Args:
        stored: the open store.
        ids: of the trajectories, [N].
        texts: turns token ids into text.

    Raises:
        MissingRowError: an id is not in the store.
    """
    num = len(ids)
    prompts, completions = stored.texts("prompt", ids), stored.texts("completion", ids)
    reasons, contexts = stored.texts("finish_reason", ids), stored.contexts(ids)
    token_rows = stored.rows("input_ids", ids) or [np.empty(0, np.int64)] * num
    masks, log_probs, reference = (stored.rows(n, ids) for n in ("assistant_mask", "log_probs", "ref_log_probs"))
    spans = stored.rows("version_spans", ids)
    engines, modes = stored.texts("engine", ids), stored.texts("log_prob_mode", ids)
    names = ("task_reward", "advantage", "temperature", "num_prompt_tokens", *_WHOLES)
    scalars = {name: stored.scalars(name, ids) for name in names}

    def whole(name: str, row: int) -> int | None:
        values = scalars[name]
        return None if values is None or values[row] < 0 else int(values[row])

    def real(name: str, row: int) -> float | None:
        values = scalars[name]
        return None if values is None else _finite(values[row])

    found: list[Trajectory] = []
    for row in range(num):
        tokens: list[int] = token_rows[row].tolist()
        head = whole("num_prompt_tokens", row) or 0
        # A mask that was left out reads as False.
        mask = [] if masks is None else masks[row].tolist()
        mask = mask if any(mask) else [False] * head + [True] * (len(tokens) - head)
        found.append(
            Trajectory(
                id=int(ids[row]),
                prompt=prompts[row],
                completion=completions[row],
                answer=_answer(contexts[row].answer),
                error=contexts[row].error,
                reward=real("task_reward", row),
                advantage=real("advantage", row),
                version_spans=() if spans is None else tuple((int(at), int(of)) for at, of in spans[row]),
                engine=engines[row],
                temperature=real("temperature", row),
                log_prob_mode=modes[row],
                finish_reason=reasons[row],
                **{name: whole(name, row) for name in _WHOLES},
                num_prompt_tokens=head,
                token_ids=tuple(tokens),
                pieces=tuple(texts.pieces(tokens, head, prompts[row], completions[row])),
                mask=tuple(mask),
                log_probs=_numbers(log_probs, row, len(tokens)) or (),
                ref_log_probs=_numbers(reference, row, len(tokens)),
            )
        )
    return found


def typical_of_first_and_last(stored: Stored) -> tuple[int, int] | None:
    """Return the ids of one typical trajectory each of the first and of the last policy version.

    A typical trajectory is the one whose reward is nearest to the mean of its rollout, rather than the best or the
    worst. None if there are no rewards, or only one version.
    """
    versions, rewards = stored.scalars("policy_version"), stored.scalars("task_reward")
    if versions is None or rewards is None:
        return None
    graded = np.isfinite(rewards)
    if not graded.any():
        return None
    first, last = (int(end) for end in (versions[graded].min(), versions[graded].max()))
    if first == last:
        return None
    ids = stored.ids()

    def typical(version: int) -> int:
        places = np.flatnonzero(graded & (versions == version))
        found = rewards[places].astype(np.float64)  # in float32 the sum of large rewards overflows
        distance = np.abs(found - found.mean())
        nearest = ids[places[np.flatnonzero(distance <= distance.min() + 1e-6)[:_TIES]]]
        # Among equally typical completions, take the first that is not empty.
        texts = stored.texts("completion", nearest)
        return int(nearest[next((row for row, text in enumerate(texts) if text.strip()), 0)])

    return typical(first), typical(last)


def before_and_after(run: RunFolder, width: int = 100) -> list[str]:
    """Return two lines of text, a typical completion of the first policy version and one of the last."""
    with Stored(run.store_path) as stored:
        pair = typical_of_first_and_last(stored)
        if pair is None:
            return []
        shown = read_trajectories(stored, np.array(pair), TokenTexts(None))
    room = max((width - 64) // 2, 12)
    parts = [
        (
            label,
            one_line(item.prompt, room),
            one_line(item.completion, room) or "(nothing)",
            f"reward {number(item.reward)}" + ("" if item.answer is None else f", answer {one_line(item.answer, 24)}"),
        )
        for label, item in zip(("before", "after"), shown, strict=True)
    ]
    prompt_width, text_width = (max(len(part[column]) for part in parts) for column in (1, 2))
    return [
        f"  {label:<6}  {prompt:<{prompt_width}}  ->  {text:<{text_width}}  ({judged})"
        for label, prompt, text, judged in parts
    ]


def _numbers(rows: Sequence[npt.NDArray[Any]] | None, row: int, num: int) -> tuple[float | None, ...] | None:
    if rows is None:
        return None
    values = tuple(_finite(value) for value in rows[row].tolist())
    known = len(values) == num and any(value is not None for value in values)
    return values if known else None  # a column that was left out reads as NaN


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _answer(value: JsonValue) -> str | None:
    """Return an answer as text; JSON for what is no text."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
