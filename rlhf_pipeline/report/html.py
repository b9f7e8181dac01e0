"""`report.html`: one file that opens anywhere, with no server, no account and no network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.errors import RunStorageError, typed
from rlhf_pipeline.report.page import SCRIPT, STYLE
from rlhf_pipeline.report.samples import Trajectory, read_trajectories, typical_of_first_and_last
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.report.svg import Point, line_chart
from rlhf_pipeline.report.tokens import TokenTexts
from rlhf_pipeline.report.words import count, flat_fields, number
from rlhf_pipeline.run.files import write_atomically
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.medium import Address, below

_VERSIONS = 8
_PER_VERSION = 24
_MAX_TOKENS = 1024
_ALL_TOKENS = 100_000
"""The most tokens on the page, so that it opens fast: a token costs about 40 bytes."""
_MAX_ROWS = 30
_NARROW = 340
"""The width of the curve on a phone, and of the small curves."""
_MOST_POINTS = 2_000
"""Steps of a curve, evenly spaced: more than a screen has columns."""
_CURVES = {
    "entropy": "entropy (nats per token)",
    "kl_k1": "KL to the reference (k1, nats)",
    "clip_fraction": "share of clipped tokens",
    "ess": "effective sample size (share)",
    "grad_norm": "gradient norm",
    "staleness": "staleness (steps)",
}
_COLUMNS = (
    *("step", "task_reward", "loss", "kl_k1", "clip_fraction", "ess", "entropy", "grad_norm", "lr", "staleness"),
    *("padding_efficiency", "tokens_per_s"),
)

_OF_EACH = ("id", "group_id", "policy_version", "reward", "advantage", "answer", "error", "finish_reason")
"""The fields of a trajectory that the browser gets unchanged."""


def write_report(run: RunFolder, html_path: Path | None = None) -> list[Address]:
    """Write `reward.svg` and `report.html`, each atomically.

    Args:
        run: the run.
        html_path: the path of the page, with the curve beside it; `report.html` in the run folder if None.

    Returns:
        The paths of both.

    Raises:
        StoreError: the store cannot be read.
        RunStorageError: the files cannot be written.
    """
    svg = reward_curve(run)
    page = html_path or run.report_file
    curve = page.with_name(run.curve_file.name)
    text = render(run, svg)
    try:
        write_atomically(curve, svg.encode())
        write_atomically(page, text.encode("utf-8", "replace"))
        if html_path is None:
            run.keep(curve)
            run.keep(page)
            run.medium.flush()
    except OSError as error:
        raise RunStorageError(
            f"{page} cannot be written: {error.strerror}. Name another place: "
            f"rlhf-pipeline report {typed(run.address)} --out FILE.html"
        ) from error
    return [below(run.address, path.name) for path in (curve, page)] if html_path is None else [curve, page]


def reward_curve(run: RunFolder, *, width: int = 720, height: int = 360) -> str:
    """Return the learning curve as SVG: the mean task reward of each rollout.

    Args:
        run: the run.
        width: of the picture in units; text is 13 units high, so 13 pixels when shown at this width.
        height: of the picture.
    """
    points = _points(run, "task_reward")
    unit = bool(points) and all(0 <= value <= 1 for _, value in points)
    return line_chart(
        points,
        title=f"{run.config.pipeline.get('name', Path(run.address).name)}: mean task reward {_of_what(run)}",
        y_label="task reward",
        target=run.config.pipeline.get("learn", {}).get("stop_at_reward"),
        y_range=(0.0, 1.0) if unit else None,
        width=width,
        height=height,
    )


def _points(run: RunFolder, name: str) -> list[Point]:
    """Return `(step, value)` of one metric where it is not null, in evenly spaced steps of the run."""
    rows = run.metrics.spread(_MOST_POINTS)
    return [(row["step"], float(row[name])) for row in rows if row.get(name) is not None]


def _of_what(run: RunFolder) -> str:
    """Return the meaning of a point of the curve: in a run over stores, stored rewards."""
    replay = run.config.pipeline.get("replay")
    return "stored with each step's trajectories" if replay and not replay["recorded_order"] else "per rollout"


def render(run: RunFolder, svg: str) -> str:
    """Return the page.

    Args:
        run: the run.
        svg: its learning curve.
    """
    texts = TokenTexts(run)
    with Stored(run.store_path) as stored:
        shown = read_trajectories(stored, choose(stored), texts)
        pair = typical_of_first_and_last(stored)
        ends = read_trajectories(stored, np.array(pair), texts) if pair else []
        total = len(stored.ids())
    name = str(run.config.pipeline.get("name", Path(run.address).name))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body><main>",
        *_head(run, name, total),
        f'<div class="card broad">{_inline(svg)}</div>',
        f'<div class="card narrow">{_inline(reward_curve(run, width=_NARROW, height=300))}</div>',
        *_before_after(ends),
        *_small_curves(run),
        *_browser(shown, total),
        *_metrics_table(run),
        *_config_table(run),
        f'<script type="application/json" id="data">{_data(shown)}</script>',
        f"<script>{SCRIPT}</script></main></body></html>",
    ]
    return "\n".join(parts)


def choose(stored: Stored) -> Ids:
    """Return the trajectories for the browser: up to eight policy versions, and in each whole groups, evenly spaced."""
    ids, versions = stored.ids(), stored.scalars("policy_version")
    if versions is None or not len(ids):
        return ids[-_VERSIONS * _PER_VERSION :]
    known = np.unique(versions)
    spread = np.unique(known[np.linspace(0, len(known) - 1, min(_VERSIONS, len(known))).round().astype(int)])
    each = _PER_VERSION
    if "input_ids" in stored.columns:
        length = float(np.minimum(stored.lengths("input_ids"), _MAX_TOKENS).mean())
        each = int(min(max(_ALL_TOKENS / (len(spread) * max(length, 1)), 2), _PER_VERSION))
    groups = stored.scalars("group_id")
    names = np.arange(len(ids)) if groups is None else groups
    return np.concatenate([_spread(ids[mine], names[mine], each) for mine in (versions == v for v in spread)])


def _spread(ids: Ids, groups: Ids, num: int) -> Ids:
    """Return about `num` rows: whole groups, with the first and the last to arrive; a large group is cut."""
    _, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    wanted = min(max(num // max(int(sizes.max()), 1), 1), len(first))
    places = np.sort(first)[np.linspace(0, len(first) - 1, wanted).round().astype(int)]
    return np.concatenate([ids[groups == groups[place]][:num] for place in places])


def _head(run: RunFolder, name: str, total: int) -> Iterator[str]:
    first, last = run.first_and_last_reward()
    went = "" if first is None else f"reward {number(first)} &rarr; {number(last)} in "
    yield f"<h1>{escape(name)}</h1>"
    yield f"<p>{went}{count(len(run.metrics), 'optimizer step')}, {count(total, 'trajectory')} stored</p>"
    versions = ", ".join(f"{escape(str(k))} {escape(str(v))}" for k, v in run.config.versions.items())
    about = f"{escape(run.config.definition)}, seed {run.config.seed}, {escape(run.config.device)}"
    yield f'<p class="soft">{about}{"; " + versions if versions else ""}</p><br>'


def _before_after(ends: Sequence[Trajectory]) -> Iterator[str]:
    if not ends:
        return
    yield '<h2>Before and after</h2><p class="soft">The completion whose reward is nearest to its rollout\'s mean.</p>'
    yield '<div class="two">'
    for label, item in zip(("First policy", "Last policy"), ends, strict=True):
        answer = "" if item.answer is None else f", answer {escape(item.answer)}"
        judged = f"reward {number(item.reward)}{answer}"
        yield f'<div class="card"><p class="soft">{label}, version {item.policy_version}: {judged}</p>'
        yield f'<p class="text soft">{escape(item.prompt)}</p>'
        yield f'<p class="text">{escape(item.completion)}</p></div>'
    yield "</div>"


def _small_curves(run: RunFolder) -> Iterator[str]:
    curves = [(title, _points(run, name)) for name, title in _CURVES.items()]
    known = [(title, points) for title, points in curves if points]
    if known:
        yield '<h2>Diagnostics</h2><div class="small">'
        for title, points in known:
            yield f'<div class="card">{_inline(line_chart(points, title=title, width=_NARROW, height=250))}</div>'
        yield "</div>"


def _browser(shown: Sequence[Trajectory], total: int) -> Iterator[str]:
    versions = len({item.policy_version for item in shown})
    yield f'<h2>Trajectories</h2><p class="soft">{count(len(shown), "trajectory")} of {total:,}: whole groups, evenly '
    yield f"spaced over {count(versions, 'policy version')} from the first to the last; <code>rlhf-pipeline show RUN "
    yield "--group G</code> shows any other. Colour: how unlikely "
    yield 'the behaviour policy found its token, <span class="bar"></span> from sure to surprised. Point at a token for'
    yield " its numbers.</p>"
    yield '<div id="controls"><label>policy <select id="version"><option value="">all versions</option></select>'
    yield "</label>"
    yield '<label>order <select id="order"><option>stored</option><option value="best">best first</option>'
    yield '<option value="worst">worst first</option></select></label></div>'
    yield '<div class="browser"><div class="card" id="items"></div><div class="card" id="detail"></div></div>'


def _metrics_table(run: RunFolder) -> Iterator[str]:
    rows, total = run.metrics.spread(_MAX_ROWS), len(run.metrics)
    if not rows:
        return
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    some = "" if len(rows) == total else f" ({len(rows)} of {total:,} lines of metrics.jsonl)"
    yield f'<h2>Metrics{some}</h2><div class="card wide"><table><thead><tr>'
    yield "".join(f"<th>{escape(name)}</th>" for name in names) + "</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{_cell(name, row.get(name))}</td>' for name in names)}</tr>"
    yield "</tbody></table></div>"


def _cell(name: str, value: Any) -> str:
    if name == "step":
        return str(value)
    return number(value, 3) if isinstance(value, (int, float)) else "-"


def _config_table(run: RunFolder) -> Iterator[str]:
    changed = dict(run.config.overrides)
    yield '<h2>Definition</h2><div class="card wide"><table class="fields"><tbody>'
    for path, value in flat_fields(run.config.pipeline):
        mark = " (--set)" if path in changed else ""
        yield f"<tr><td>{escape(path)}</td><td>{escape(str(value))}{mark}</td></tr>"
    yield "</tbody></table></div>"


def _data(shown: Sequence[Trajectory]) -> str:
    """Return the browser's data as JSON that cannot end its script element."""
    rows = [
        {name: getattr(item, name) for name in _OF_EACH}
        | {
            "completion": item.completion[:200],
            "token_ids": item.token_ids[:_MAX_TOKENS],
            "pieces": item.pieces[:_MAX_TOKENS],
            "mask": item.mask[:_MAX_TOKENS],
            "log_probs": _rounded(item.log_probs),
            "ref_log_probs": None if item.ref_log_probs is None else _rounded(item.ref_log_probs),
            "cut": max(0, len(item.token_ids) - _MAX_TOKENS),
        }
        for item in shown
    ]
    text = json.dumps(rows, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values[:_MAX_TOKENS]]


def _inline(svg: str) -> str:
    """Return an SVG document for inclusion in a page, which needs no namespace."""
    return svg.replace(' xmlns="http://www.w3.org/2000/svg"', "")
