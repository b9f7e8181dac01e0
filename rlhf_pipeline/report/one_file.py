"""`report.html`: the pages of the view over recorded answers, in one file that opens anywhere, with no server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.errors import RunStorageError, typed
from rlhf_pipeline.report.query import LISTS, Answer, View
from rlhf_pipeline.report.scans import all_rows, page_of
from rlhf_pipeline.report.stored import Ids
from rlhf_pipeline.report.view.answers import answer
from rlhf_pipeline.run.address import Address, below
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store.new_files import write_atomically

MOST_BYTES: Final = 1_650_000
"""The maximum size of all recorded answers; with the pages, the file is smaller than 2 MB."""
_STEP_BYTES = 700
"""The approximate size of a step whose groups are not in the report."""
_STATIC = Path(__file__).parent / "view" / "static"
_STEPS = 16
_GROUPS = 48
"""The maximum number of groups of a step; a cell shows the reward of a member."""
_EACH = 12
_TOKENS = 1024
_ROWS_AT_ONCE = 64
"""The number of rows, from all parts of a store, that are read together without the rows between them."""
_EMPTY: Final = {
    **{"total": 0, "matched": 0, "complete": True, "scanned_to": 0, "offset": 0, "snapshot": 0},
    "rows": list[Answer](),
}
_PER_TOKEN = ("ids", "pieces", "mask", "log_probs", "ref", "policy", "entropy")


def write_report(run: RunFolder, html_path: Path | None = None) -> Address:
    """Write the page atomically."""
    page = html_path or run.report_file
    view = View(run.address)
    try:
        text = render(view)
    finally:
        view.close()
    try:
        write_atomically(page, text.encode("utf-8", "replace"))
        if html_path is None:
            run.keep(page)
            run.flush()
    except OSError as error:
        raise RunStorageError(
            f"{page} cannot be written: {error.strerror}. Choose another path: rlhf-pipeline report "
            f"{typed(run.address)} --out FILE.html"
        ) from error
    return below(run.address, page.name) if html_path is None else page


def render(view: View) -> str:
    """Return the page of a run: its curves, and a choice of its trajectories, groups and steps."""
    data = json.dumps(record(view), separators=(",", ":"), allow_nan=False)
    for character in "<&\u2028\u2029":  # nothing in it ends the script
        data = data.replace(character, f"\\u{ord(character):04x}")
    names = sorted(path.name for path in _STATIC.glob("*.js"))
    modules = {"lit-html": _url("vendor/lit-html.js"), **{f"view/{name}": _url(name) for name in names}}
    style = _text("vendor/uPlot.min.css") + _text("style.css")
    policy = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<title>{escape(view.name)}</title><link rel="icon" href="data:,"><style>{style}</style>'
        f'<script type="importmap">{json.dumps({"imports": modules})}</script>'
        f'<script>{_text("vendor/uPlot.iife.min.js")}</script></head><body><div id="app"></div>'
        f'<script type="application/json" id="recorded">{data}</script>'
        '<script type="module">import "view/app.js";</script></body></html>\n'
    )


def record(view: View) -> Answer:
    """Return the answers that the page has, by the address of their question: one for everything that can be clicked.

    A step on a curve has its figures and counts, and a choice of steps their groups too. Counts are of the whole run;
    the page lists what is not in the report.
    """
    about = view.about()
    here = "runs/0"
    answers: Answer = {
        "runs": [{"key": 0, **about}],
        f"{here}/metrics": view.metrics(),
        f"{here}/definition": view.definition(),
        f"{here}/health": answer([view], f"{here}/health", {}),
        f"{here}/fields": about["fields"],
    }
    answers[f"{here}/trajectories"], answers[f"{here}/facets"] = _EMPTY, {"kinds": []}
    evaluations = answers[f"{here}/evaluations"] = view.evaluations()
    if not about["stored"]:
        return answers
    curves = answers[f"{here}/metrics"]
    room = MOST_BYTES - len(json.dumps(curves)) - _STEP_BYTES * len(curves["step"])
    room = max(room, MOST_BYTES // 5)
    share = room // 5 // max(len(evaluations), 1)
    for evaluation in evaluations:
        answers |= _rows_of(view.evaluation(evaluation["store"]), f"{here}~{evaluation['store']}", share)
    answers |= _rows_of(view, here, room - share * len(evaluations))
    included = {row["id"] for row in answers[f"{here}/trajectories"]["rows"]}
    for name in LISTS:
        listed = view.list(name)
        if "rows" in listed:
            listed["rows"] = [row for row in listed["rows"] if row["id"] in included]
        answers[f"{here}/lists/{name}"] = listed
    answers |= _steps_of(view, here, answers)
    return answers


def _steps_of(view: View, here: str, answers: Answer) -> Answer:
    """Return the answers about every step that a page of the report leads to."""
    whole = _steps(view)
    linked = {*answers[f"{here}/metrics"]["step"], *whole}
    used = [item["steps"] for place, item in answers.items() if place.startswith(f"{here}/trajectories/")]
    linked |= {step for steps in used for step in steps}
    linked |= {mismatch["step"] for mismatch in answers[f"{here}/lists/mismatch"]["steps"]}
    order = sorted(linked)
    places = {step: place for place, step in enumerate(order)}
    answers_of_steps: Answer = {}
    for step, place in places.items():
        item = view.step(step, limit=_GROUPS if step in whole else 0)
        item["prev"] = order[place - 1] if place else None
        item["next"] = order[place + 1] if place + 1 < len(order) else None
        item["near"] = sorted(sorted(whole, key=lambda near: abs(near - step))[:2])
        for evaluation in item["evaluations"]:
            rows = answers[f"{here}~{evaluation['store']}/trajectories"]["rows"]
            included = {row["id"] for row in rows}
            evaluation["rows"] = [row for row in evaluation["rows"] if row["id"] in included]
        answers_of_steps[f"{here}/steps/{step}"] = {
            **item,
            "metrics": {},
            "ledger": {},
        }  # the figures are those of the curves
    return answers_of_steps


def _rows_of(view: View, here: str, most: int) -> Answer:
    """Return the answers about a choice of trajectories, in about so many bytes: a table, groups, each whole."""
    items, used, fields = dict[int, Answer](), 0, view.fields()
    for id in choose(view):
        item = _shortened(view.trajectory(id))
        # Its texts are in its group and in the table, too.
        used += len(json.dumps(item)) + 2 * len(json.dumps([item["prompt"], item["completion"]])) + 1500
        if used > most:
            break
        items[id] = item
    chosen, names = np.array(sorted(items), np.int64), [field["name"] for field in fields]
    parts = (chosen[first : first + _ROWS_AT_ONCE] for first in range(0, len(chosen), _ROWS_AT_ONCE))
    rows = [row for part in parts for row in view.rows(part, names)]
    answers: Answer = {
        f"{here}/trajectories": {**_EMPTY, "total": len(view.stored.store), "rows": rows},
        f"{here}/facets": view.facets(),
        f"{here}/fields": fields,
    }
    for id, item in items.items():
        answers[f"{here}/trajectories/{id}"] = {**item, "prev": None, "next": None}
    included = {row["id"] for row in rows}
    for group in sorted({row["group"] for row in rows if row["group"] is not None}):
        whole = view.group(group)
        if all(row["id"] in included for row in whole["rows"]):
            answers[f"{here}/groups/{group}"] = whole
    return answers


def choose(view: View) -> list[int]:
    """Return trajectories worth keeping, the most informative first, each once.

    A group of the first, the last and evenly spaced steps, the highest and lowest rewards, failures, the first and the
    last to arrive, one of each of some versions, and a random sample, which is the same each time.
    """
    rows = all_rows(view.stored)
    graded = rows.meeting(lambda ids: _is_graded(view, ids))
    failed = rows.meeting(lambda ids: ~_is_graded(view, ids))
    extremes = [page_of(view.stored, graded, sort, 0, _EACH) for sort in ("-reward", "reward")] if len(graded) else []
    places = np.unique(np.linspace(0, max(len(rows) - 1, 0), 4 * _EACH).round().astype(np.int64))[: len(rows)]
    spread = rows.arrivals.take(places) if len(rows) else rows[:0]
    versions = view.stored.scalars("policy_version", spread)
    sample = np.random.default_rng(0).choice(len(rows), min(8 * _EACH, len(rows)), replace=False)
    parts: list[Ids] = [rows[:_EACH], rows[-_EACH:], *extremes, failed[-_EACH:], *_of_steps(view)]
    if versions is not None:
        parts.append(spread[np.unique(versions, return_index=True)[1]])
    return list(dict.fromkeys(np.concatenate([*parts, rows.arrivals.take(np.sort(sample))]).tolist()))


def _is_graded(view: View, ids: Ids) -> npt.NDArray[np.bool_]:
    rewards = view.stored.scalars("task_reward", ids)
    return np.zeros(len(ids), bool) if rewards is None else np.isfinite(rewards)


def _steps(view: View) -> list[int]:
    """Return at most 16 evenly spaced steps, with the first and the last."""
    rows = view.ledger_rows()
    return [row["step"] for row in rows.spread(_STEPS)] if len(rows) else []


def _of_steps(view: View) -> Iterator[Ids]:
    """Yield a whole group of each of some steps, or some trajectories of a step without groups."""
    for step in _steps(view):
        for group in view.step(step, limit=1)["groups"]:
            yield np.array([int(id) for id in group["ids"][: 4 * _EACH]], np.int64)


def _shortened(item: Answer) -> Answer:
    """Return a trajectory with its first 1,024 tokens from where the completion begins, and four decimals."""
    start = max(min(item["prompt_tokens"] - 64, len(item["ids"]) - _TOKENS), 0)
    part = slice(start, start + _TOKENS)
    few = {name: _rounded(item[name][part]) for name in _PER_TOKEN if item[name] is not None}
    return {**item, **few, "first": start, "num_tokens": len(few["ids"])}


def _rounded(values: list[Any]) -> list[Any]:
    return [round(figure, 4) if isinstance(figure, float) else figure for figure in values]


def _text(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _url(name: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode((_STATIC / name).read_bytes()).decode()
