"""Trajectories as text: one line each, or every token with its log-prob."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from rlhf_pipeline.errors import count, plain
from rlhf_pipeline.report.formatting import number, one_line
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store import Arrivals

_TIES = 64
_EARLY = 1 << 16
"""The number of rows that are searched for a prompt of the last version."""


def brief(items: Sequence[Answer], width: int = 110) -> Iterator[str]:
    """Yield a table with one line per trajectory."""
    id_width = max([len(item["id"]) for item in items] + [2])
    group_width = max([len(_or_dash(item["group"])) for item in items] + [6])
    room = max((width - id_width - group_width - 46) // 2, 12)
    head = ("group", group_width), ("version", 7), ("tokens", 6), ("reward", 7), ("advant.", 8)
    yield f"{'id':>{id_width}}  {' '.join(f'{name:>{space}}' for name, space in head)}  prompt -> completion"
    for item in items:
        texts = f"{one_line(item['prompt'], room)} -> {one_line(item['completion'], room)}"
        tail = "" if item["finish"] in ("stop", "length", "") else f"  ({plain(item['finish'])})"
        yield (
            f"{item['id']:>{id_width}}  {_or_dash(item['group']):>{group_width}} {_versions(item):>7} "
            f"{item['tokens']:>6} {number(item['reward']):>7} {number(item['advantage']):>8}  "
            f"{texts}{tail}"
        )


def _used(item: Answer) -> str:
    """Return in which steps the weights learned from a trajectory, and in which it had no gradient."""
    idle = [use["step"] for use in item.get("uses", ()) if use["without_gradient"]]
    learned = [step for step in item["steps"] if step not in idle]
    uses = (("learned from in step", learned), ("without a gradient in step", idle))
    return "".join(f", {what} {', '.join(map(str, steps))}" for what, steps in uses if steps)


def full(item: Answer, *, max_tokens: int | None = None) -> Iterator[str]:
    """Yield all stored values of one trajectory."""
    yield (
        f"trajectory {item['id']}: group {_or_dash(item['group'])}, policy version {_versions(item)}, "
        f"finished by {plain(item['finish']) or '-'}"
    )
    yield f"  reward {number(item['reward'], 4)}, advantage {number(item['advantage'], 4)}{_used(item)}"
    if item["engine"]:
        heat = "" if item["temperature"] is None else f" at temperature {item['temperature']:g}"
        mode = f", {plain(item['log_prob_mode'])} log-probs" if item["log_prob_mode"] else ""
        yield f"  sampled by {plain(item['engine'])}{heat}{mode}"
    if item["spans"]:
        yield "  weights: " + ", ".join(f"version {of} from place {at}" for at, of in item["spans"])
    if item["error"] is not None:
        yield f"  it failed: {plain(item['error'])}"
    yield from _text("prompt", item["prompt"])
    yield from _text("completion", item["completion"])
    if item["answer"] is not None:
        yield from _text("answer", item["answer"])
    mine = [
        log_prob
        for log_prob, is_sampled in zip(item["log_probs"], item["mask"], strict=False)
        if is_sampled != 0 and log_prob is not None
    ]
    num, unknown = item["mask"].count(1), item["mask"].count(None)
    rest = item["num_tokens"] - item["prompt_tokens"] - num - unknown
    between = f", {count(rest, 'token')} of replies" if rest else ""
    between += f", {count(unknown, 'token')} of unknown origin" if unknown else ""
    total = f", log-prob {number(sum(mine))} in total, {number(sum(mine) / len(mine))} per token" if mine else ""
    yield f"  {count(item['prompt_tokens'], 'prompt token')}, {count(num, 'completion token')}{between}{total}"
    yield from _token_table(item, max_tokens)


def _text(label: str, text: str) -> Iterator[str]:
    lines = plain(text).split("\n")
    yield f"  {label:<10}  {lines[0]}"
    for line in lines[1:]:
        yield f"  {'':<10}  {line}"


def _token_table(item: Answer, max_tokens: int | None) -> Iterator[str]:
    places = list(range(item["num_tokens"]))
    if max_tokens is not None and len(places) > max_tokens:
        # The policy's own tokens matter most; a few prompt tokens before them show where they start.
        start = max(0, item["prompt_tokens"] - 4)
        places = places[start : start + max_tokens]
    reference, spans = item["ref"], item["spans"]
    version = f" {'version':>7}" if spans else ""
    yield f"  {'place':>7} {'id':>7}  {'text':<16} {'by':<7}{version} {'log-prob':>9} {'prob':>6}" + (
        f" {'ref':>9} {'k1':>8}" if reference else ""
    )
    for place in places:
        log_prob = item["log_probs"][place] if item["log_probs"] else None
        mine = item["mask"][place]
        origin = "policy" if mine else "prompt" if place < item["prompt_tokens"] else "reply"
        origin = "unknown" if mine is None else origin
        if spans:
            version = f" {next((str(of) for at, of in reversed(spans) if mine and at <= place), ''):>7}"
        line = (
            f"  {place:>7} {item['ids'][place]:>7}  {one_line(item['pieces'][place], 16):<16} "
            f"{origin:<7}{version} {_digits(log_prob, 4):>9} "
            f"{_digits(None if log_prob is None else math.exp(log_prob), 3):>6}"
        )
        if reference:
            ref = reference[place]
            k1 = None if log_prob is None or ref is None or mine == 0 else log_prob - ref
            line += f" {_digits(ref, 4):>9} {_digits(k1, 4):>8}"
        yield line
    left_out = item["num_tokens"] - len(places)
    if left_out:
        yield f"  {count(left_out, 'token')} omitted; --full shows all"


def _digits(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 makes -0.0 plain zero


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _versions(item: Answer) -> str:
    newest = item["newest"]
    return _or_dash(item["version"]) + ("" if newest is None else f"-{newest}")


def typical_of_first_and_last(stored: Stored) -> tuple[int, int] | None:
    """Return the ids of two completions of one prompt, of the first and of the last policy version that had it.

    Of the prompts of the last version, the one that was there earliest counts; of several, and of their completions,
    those whose rewards are nearest to the means of their versions, rather than the best or the worst. Where no prompt
    came twice, the two are of two prompts. None if there are no rewards, or only one version.
    """
    versions, rewards = stored.scalars("policy_version"), stored.scalars("task_reward")
    if versions is None or rewards is None:
        return None
    graded = np.isfinite(rewards)
    if not graded.any() or versions[graded].min() == versions[graded].max():
        return None
    arrivals, last = stored.store.arrivals(), int(versions[graded].max())

    def places_of(version: int) -> Ids:
        return np.flatnonzero(graded & (versions == version))

    def mean_of(version: int) -> float:
        return float(rewards[places_of(version)].astype(np.float64).mean())  # the sum of large float32 overflows

    def typical(places: Ids, mean: float) -> tuple[float, int]:
        """Return the distance of the reward nearest to a mean, and its place, an empty text last."""
        distance = np.abs(rewards[places].astype(np.float64) - mean)
        nearest = places[np.flatnonzero(distance <= distance.min() + 1e-6)[:_TIES]]
        texts = stored.texts("completion", arrivals.take(nearest))
        return float(distance.min()), int(nearest[next((row for row, text in enumerate(texts) if text.strip()), 0)])

    late = _by_prompt(stored, arrivals, places_of(last))
    earlier = np.flatnonzero(graded & (versions < last))[:_EARLY]
    early = {prompt: places for prompt, places in _by_prompt(stored, arrivals, earlier).items() if prompt in late}
    first = int(min(versions[places].min() for places in early.values())) if early else int(versions[graded].min())
    pairs = [(places[versions[places] == first], late[prompt]) for prompt, places in early.items()]
    pairs = [pair for pair in pairs if len(pair[0])] or [(places_of(first), places_of(last))]
    means = mean_of(first), mean_of(last)
    candidates = [[typical(places, mean) for places, mean in zip(pair, means, strict=True)] for pair in pairs]
    before, after = min(candidates, key=lambda candidate: candidate[0][0] + candidate[1][0])
    first_id, last_id = arrivals.take(np.array([before[1], after[1]])).tolist()
    return first_id, last_id


def _by_prompt(stored: Stored, arrivals: Arrivals, places: Ids) -> dict[str, Ids]:
    """Return places by the text of their prompt."""
    by_prompt: dict[str, list[int]] = {}
    for place, prompt in zip(places.tolist(), stored.texts("prompt", arrivals.take(places)), strict=True):
        by_prompt.setdefault(prompt, []).append(place)
    return {prompt: np.array(of) for prompt, of in by_prompt.items() if prompt}


def before_and_after(run: RunFolder, width: int = 100) -> list[str]:
    """Return two lines of text, a typical completion of an early policy version and one of the last.

    They are of one held-out prompt where the run evaluates, else of one prompt that occurs twice, else of two prompts,
    which a third line states.
    """
    examples: list[Answer] = []
    with closing(View(run.address)) as view:
        for source in (*(view.evaluation(evaluation["store"]) for evaluation in view.evaluations()), view):
            if pair := typical_of_first_and_last(source.stored):
                examples = [source.trajectory(id) for id in pair]
                break
    if not examples:
        return []
    room = max((width - 64) // 2, 12)
    parts = [
        (
            label,
            one_line(item["prompt"], room),
            one_line(item["completion"], room) or "(nothing)",
            f"reward {number(item['reward'])}"
            + ("" if item["answer"] is None else f", answer {one_line(item['answer'], 24)}"),
        )
        for label, item in zip(("before", "after"), examples, strict=True)
    ]
    prompt_width, text_width = (max(len(part[column]) for part in parts) for column in (1, 2))
    lines = [
        f"  {label:<6}  {prompt:<{prompt_width}}  ->  {text:<{text_width}}  ({judged})"
        for label, prompt, text, judged in parts
    ]
    same = examples[0]["prompt"] == examples[1]["prompt"]
    return lines if same else [*lines, "  (two different prompts, because no early prompt occurs again at the end)"]
