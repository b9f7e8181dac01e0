"""All that is shown of a run, a store or files: one reader for the shell, the pages and the report, without torch.

Every answer is plain data that JSON can hold: ids are strings (JavaScript's numbers end at 2^53), and a number that is
not finite is null.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.filters import masks_known, meets, num_completion_tokens
from rlhf_pipeline.buffer.text_search import search, text_bytes
from rlhf_pipeline.config_text import flat_fields
from rlhf_pipeline.data.episodes import stored_last_rows
from rlhf_pipeline.errors import MissingKeyError, MissingPathError, count
from rlhf_pipeline.report.causes import Causes, cause_of, messages
from rlhf_pipeline.report.figures import figure_of
from rlhf_pipeline.report.notes import Notes
from rlhf_pipeline.report.row_fields import fields_of, is_named_reward, values_of
from rlhf_pipeline.report.scans import MatchingRows, all_rows, by_version, page_of, rows_with, text_counts
from rlhf_pipeline.report.steps import groups_of, num_groups, uses_of
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.report.tokens import TokenTexts
from rlhf_pipeline.run.address import Address, address_of, below
from rlhf_pipeline.run.evaluation_rows import evaluation_stores, recorded_sets, set_of_store, stored_evaluations
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.lookup import is_run, open_run_or_store, run_of_evaluation
from rlhf_pipeline.run.place import is_store
from rlhf_pipeline.run.recorded_code import graders

Answer = dict[str, Any]

MOST_ROWS: Final = 500
"""The maximum number of rows in one response."""
MOST_TOKENS: Final = 4096
"""The maximum number of tokens in one response; a longer trajectory is read in windows."""
LISTS: Final = ("failed", "untrusted", "drift", "mismatch")

_SCALARS: Final = {
    "reward": "task_reward",
    "advantage": "advantage",
    "version": "policy_version",
    "group": "group_id",
}
_FURTHER = ("newest_policy_version", "created_at", "evaluation", "return", "degenerate")
_BLOCK_ROWS = 1 << 16
_ENOUGH_S = 0.15
"""A search returns a full page after this time; the next request continues from there."""
_BUDGET_S = 0.5
_SEARCHES = 4
"""Number of searches whose hits are kept, at 8 bytes per hit."""
_LOG_BYTES = 16_384
_LISTED: Final = 100
"""The maximum number of rows of a list in one response."""
_MOST_EVALUATED = 32
"""The maximum number of rows of an evaluation that a step shows; its store contains all rows."""
_NO_FIGURES: Final[Answer] = {"num": 0, "units": {}, "step": [], "time": [], "values": {}}
_BARS = 8
_MOST_VERSIONS: Final = 200
_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
_EARLIER = 40
"""Characters of a completion that are shown before a hit."""


@dataclass
class _Search:
    """The progress of a search, newest rows first, and its hits."""

    left: Iterator[tuple[Ids, int]]
    among: MatchingRows
    """The rows that meet the conditions."""
    match_places: list[Ids] = field(default_factory=list[Ids])
    """Positions of hits in the order of arrival, ascending within a part and the newest part first."""
    hits: int = 0
    down_to: int = 0
    """Rows from this position on were searched."""

    @property
    def matches(self) -> MatchingRows:
        """The rows that were found so far."""
        places = np.concatenate([np.zeros(0, np.int64), *self.match_places[::-1]])
        return MatchingRows(self.among.arrivals, places)

    def go_on(self, seconds: float, enough: int | None) -> None:
        """Continue the search for some seconds, or until there are enough hits and the shorter time has passed."""
        began = time.perf_counter()
        for places, first in self.left:
            positions = self.among.positions
            self.match_places.append(places if positions is None else positions[places])
            self.hits += len(places)
            self.down_to = first if positions is None or not first else int(positions[first])
            took = time.perf_counter() - began
            if took > seconds or (enough is not None and self.hits >= enough and took > _ENOUGH_S):
                return
        self.down_to = 0


class View:
    """Reads a run, or a store alone, for showing; it never writes. A run that has stored nothing yet is empty."""

    def __init__(self, path: Address | str, *, name: str | None = None, tokenizer: str | None = None) -> None:
        address = address_of(path)
        self.run: RunFolder | None
        if is_run(address):
            self.run = RunFolder.open(address)
            self._store_path = self.run.store_path
        else:
            self.run, self._store_path = open_run_or_store(address)
        self.address: Address = self._store_path if self.run is None else self.run.address
        self.name = name or str(self.address).rstrip("/").rpartition("/")[2]
        self._texts = TokenTexts(self.run or run_of_evaluation(address), tokenizer)
        self._stored: Stored | None = None
        self._evaluations: dict[str, View] = {}
        self._evaluated: dict[str, tuple[int, Answer]] = {}
        self._searches: OrderedDict[tuple[object, ...], _Search] = OrderedDict()
        self._causes = {name: Causes() for name in ("failed", "untrusted")}

    def close(self) -> None:
        """Close the store and the stores of the evaluations."""
        for view in self._evaluations.values():
            view.close()
        if self._stored is not None:
            self._stored.store.close()

    @property
    def stored(self) -> Stored:
        """The current state of the store."""
        if self._stored is None:
            if not is_store(self._store_path):
                open_run_or_store(self.address)  # reports what is missing, and what to do
            self._stored = Stored(self._store_path, copies=True)
        return self._stored

    @property
    def is_gone(self) -> bool:
        """Whether the folder of the run or store was removed; what is at a URL is asked for by each request anyway."""
        return isinstance(self.address, Path) and not self.address.is_dir()

    def refresh(self) -> int:
        """Read the rows stored since the last call; return the watermark, 0 if no rows are stored yet."""
        try:
            return self.stored.store.refresh()
        except MissingPathError:
            return 0

    # -- the run -----------------------------------------------------------------------------------------------------

    def about(self) -> Answer:
        """Return the run in one row: name, definition, steps, first and last reward, what is stored, processes."""
        if self.is_gone:
            raise MissingPathError(f"{self.address} no longer exists: it was moved or removed.")
        watermark = self.refresh()
        rows = self.metrics_rows()
        ends = [row["task_reward"] for row in (*rows[:8], *rows[-8:]) if row.get("task_reward") is not None]
        pipeline = self.run.config.pipeline if self.run is not None else {}
        return {
            "name": self.name,
            "address": str(self.address),
            "definition": pipeline.get("name"),
            "seed": self.run.config.seed if self.run is not None else None,
            "step": rows[-1]["step"] if len(rows) else None,
            "of": pipeline.get("learn", {}).get("steps"),
            "target": pipeline.get("learn", {}).get("stop_at_reward"),
            "reward_first": ends[0] if ends else None,
            "reward_last": ends[-1] if ends else None,
            "evaluation": self._newest_evaluation(pipeline),
            "stored": len(self.stored.store) if watermark else 0,
            "failed": all_rows(self.stored).count(self._lacks_reward) if watermark else 0,
            "watermark": watermark,
            "updated": rows[-1].get("time") if len(rows) else None,
            "processes": self.processes(),
            "columns": sorted(self.stored.columns) if watermark else [],
            "fields": fields_of(self.stored) if watermark else [],
        }

    def _newest_evaluation(self, pipeline: Mapping[str, Any]) -> float | None:
        """Return the mean reward of the newest evaluation that a step has in its line."""
        rows, (name, evaluation) = self.metrics_rows(), next(iter(recorded_sets(pipeline).items()), ("", {}))
        every = evaluation.get("every")
        row = rows.of_step(rows[-1]["step"] // every * every) if every and len(rows) else None
        return (row or {}).get(f"evaluation/{name}/reward" if name else "evaluation/reward")

    def processes(self) -> list[Answer]:
        """Return the processes of a run of several, as each last reported itself."""
        if self.run is None or not self.run.processes.is_dir():
            return []
        processes = []
        for file in sorted(self.run.processes.glob("*.json")):
            heartbeat = self.run.place.heartbeat_of(file.stem)
            if heartbeat:
                alive = self.run.place.is_alive(file.stem)
                processes.append({**heartbeat, "name": file.stem, "seen": heartbeat.get("time"), "alive": alive})
        return processes

    def metrics(self, names: Sequence[str] = (), *, points: int = 600, after: int = 0) -> Answer:
        """Return figures of `metrics.jsonl` as columns, in evenly spaced steps, with their units and meanings.

        A store alone has the figures that its rows give, by policy version.
        """
        if self.run is None:
            return self._figures_of_rows(points) if self.refresh() and not after else dict(_NO_FIGURES)
        rows = self.metrics_rows()
        some = [row for row in (rows.spread(points) if len(rows) else []) if row["step"] > after]
        numbers = {
            key for row in some[:1] + some[-1:] for key, figure in row.items() if isinstance(figure, int | float)
        }
        selected = list(names) or sorted(numbers - {"step", "time"})
        about = {name: figure_of(name) for name in selected}
        return {
            "num": len(rows),
            "units": {name: [figure.unit, figure.meaning] for name, figure in about.items() if figure is not None},
            "step": [row["step"] for row in some],
            "time": [row.get("time") for row in some],
            "values": {name: [finite(row.get(name)) for row in some] for name in selected},
        }

    def _figures_of_rows(self, points: int) -> Answer:
        """Return the figures of a store without a run: what its rows give for each policy version."""
        sums = by_version(self.stored, points, first=0)  # -1 is an unknown version
        is_graded = sums.graded > 0
        with np.errstate(invalid="ignore", divide="ignore"):
            values = {
                "task_reward": np.where(is_graded, sums.rewards / sums.graded, np.nan),
                "completion_length": sums.tokens / sums.num,
                "num_failed": sums.failed,
                "flat_groups": np.where(sums.groups > 0, sums.flat_groups / sums.groups, np.nan),
            }
        about = {name: figure_of(name) for name in values}
        return {
            "num": sums.num_versions,
            "units": {name: [figure.unit, figure.meaning] for name, figure in about.items() if figure is not None},
            "step": sums.versions.tolist(),
            "time": [None] * len(sums.versions),
            "values": {name: [finite(figure) for figure in column.tolist()] for name, column in values.items()},
        }

    def changes(self) -> Answer:
        """Return the values that a page polls: watermark, newest step, process states, and whether the run is gone."""
        if self.is_gone:
            return {"watermark": 0, "step": None, "beats": [], "gone": True}
        rows = self.metrics_rows()
        beats = [[process["name"], process.get("state"), process["seen"]] for process in self.processes()]
        return {"watermark": self.refresh(), "step": rows[-1]["step"] if len(rows) else None, "beats": beats}

    def health(self) -> Answer:
        """Return the processes, and the ends of the run's logs."""
        files = () if self.run is None else (self.run.log_file, self.run.supervisor_log)
        logs = {file.name: _end_of(file) for file in files if file.is_file()}
        return {"now": time.time(), "processes": self.processes(), "logs": logs}

    def definition(self) -> Answer:
        """Return the definition, flat: `{"learn.lr": 0.001, ...}`, with its graders; empty for a store alone."""
        if self.run is None:
            return {}
        fields = {
            name: str(setting) if isinstance(setting, list) else setting for name, setting in self._fields().items()
        }
        return fields | {f"grader from step {grader['from_step']}": grader["what"] for grader in self.graders()}

    def graders(self) -> list[Answer]:
        """Return the graders of a run with the first step that each applied to; empty if there was one throughout."""
        changes = [] if self.run is None else graders(self.run.record.history)
        return [{"from_step": step, "what": what} for step, what in changes] if len(changes) > 1 else []

    def _fields(self) -> Mapping[str, Any]:
        return dict(flat_fields(self.run.config.pipeline)) if self.run is not None else {}

    # -- trajectories ------------------------------------------------------------------------------------------------

    def trajectories(
        self,
        *,
        text: str = "",
        column: str = "completion",
        where: Sequence[str] = (),
        sort: str = "-id",
        offset: int = 0,
        limit: int = 50,
        snapshot: int | None = None,
        everything: bool = False,
        columns: Sequence[str] = (),
        prompt_of: int | None = None,
    ) -> Answer:
        """Return a page of the trajectories that meet conditions.

        A search in texts answers with what it has found within half a second: `complete` is whether it is at its end,
        `scanned_to` down to which row it has looked, newest first. The same question asked again continues from there.

        Args:
            text: only rows whose text has this, ASCII letters of either case.
            column: `completion` or `prompt`, where `text` is looked for.
            where: conditions, as `select` reads them; `label==NAME` and `noted==true` are on the notes beside the run.
            sort: `id` or a field with a number, `-` before it for the largest first; rows without a value come last.
            offset: the number of rows to skip.
            limit: return at most so many, up to `MOST_ROWS`.
            snapshot: the watermark up to which the store is read; None means now.
            everything: let the search continue for half a second, even if the page is full.
            columns: fields whose values the rows have besides.
            prompt_of: only rows of the same prompt as this trajectory.
        """
        stored, among, where = self.stored, self._rows(snapshot), self._resolved(where)
        if text and (column not in ("completion", "prompt") or column not in stored.columns):
            raise MissingKeyError(f"{self.name} has no text column '{column}' to search in.")
        if text:
            hunt = self._search(text, column, where, prompt_of, among, snapshot)
            hunt.go_on(_BUDGET_S, None if everything or sort != "-id" else offset + limit + 1)
            matches, scanned = hunt.matches, hunt.down_to
        else:
            matches, scanned = self._meeting(where, prompt_of, among), 0
        page = page_of(stored, matches, sort, offset, min(max(limit, 1), MOST_ROWS))
        return {
            "total": len(among),
            "matched": len(matches),
            "complete": scanned == 0,
            "scanned_to": scanned,
            "offset": offset,
            "snapshot": stored.store.watermark if snapshot is None else snapshot,
            "rows": [self._cut(row, text, column) for row in self.rows(page, columns)],
        }

    def _search(
        self,
        text: str,
        column: str,
        where: Sequence[str],
        prompt_of: int | None,
        among: MatchingRows,
        snapshot: int | None,
    ) -> _Search:
        """Return the search for a text as far as it has come; the last few are kept."""
        watermark = self.stored.store.watermark if snapshot is None else snapshot
        key = (text, column, tuple(where), prompt_of, watermark, len(among))
        hunt = self._searches.pop(key, None)
        if hunt is None:
            matches = self._meeting(where, prompt_of, among)
            hunt = _Search(search(self.stored.store, column, text, matches), matches, down_to=len(among))
        self._searches[key] = hunt
        while len(self._searches) > _SEARCHES:
            self._searches.popitem(last=False)
        return hunt

    def matching(
        self, where: Sequence[str], *, text: str = "", column: str = "completion", prompt_of: int | None = None
    ) -> list[str]:
        """Return the conditions that select the rows of `trajectories`, in the form that `select` reads."""
        conditions = self._resolved(where)
        if text:
            conditions.append(condition_on(column, "~", text))
        if prompt_of is not None:
            conditions.append(condition_on("prompt", "==", self._prompt_of(prompt_of).decode()))
        return conditions

    @property
    def _notes(self) -> Notes | None:
        """The notes beside the run; None if the store has columns with the names that conditions on notes use."""
        return None if {"label", "noted"}.intersection(self.stored.columns) else Notes(self.address)

    def _resolved(self, where: Sequence[str]) -> list[str]:
        """Return conditions as `select` reads them: those on notes are conditions on the ids of the noted rows."""
        notes = self._notes
        return [*where] if notes is None else [notes.resolved(condition) for condition in where]

    def _meeting(self, where: Sequence[str], prompt_of: int | None, among: MatchingRows) -> MatchingRows:
        if where:
            among = among.meeting(lambda ids: meets(self.stored.store, where, ids))
        if prompt_of is not None:
            prompt = self._prompt_of(prompt_of)
            among = among.meeting(lambda ids: self._of_prompt(prompt, ids))
        return among

    def _prompt_of(self, id: int) -> bytes:
        self.place_of_trajectory(id)
        if "prompt" not in self.stored.columns:
            raise MissingKeyError(f"{self.name} stores no prompts.")
        return text_bytes(self.stored.store, "prompt", np.array([id], np.int64))[0].tobytes()

    def _of_prompt(self, prompt: bytes, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which of some trajectories have a prompt, compared by bytes."""
        keep, prompt_bytes = np.zeros(len(ids), bool), np.frombuffer(prompt, np.uint8)
        flat, starts = text_bytes(self.stored.store, "prompt", ids)
        rows = np.flatnonzero(np.diff(starts) == len(prompt_bytes))
        for begin in range(0, len(prompt_bytes), 64):  # few rows are left after the first part
            part = prompt_bytes[begin : begin + 64]
            rows = rows[(flat[starts[rows, None] + np.arange(begin, begin + len(part))] == part).all(1)]
        keep[rows] = True
        return keep

    def prompt(self, text: bytes) -> Answer:
        """Return how a prompt went over the versions of the policy: `versions`, with `num`, `reward`, `best`."""
        if "prompt" not in self.stored.columns:
            return {"name": self.name, "num": 0, "versions": [], "newest": None}
        matches = all_rows(self.stored).meeting(lambda ids: self._of_prompt(text, ids))[:]
        versions = self.stored.scalars("policy_version", matches)
        rewards = self._floats("task_reward", matches)
        distinct, place = np.unique(np.zeros(len(matches), int) if versions is None else versions, return_inverse=True)
        rows = [rewards[place == at] for at in range(len(distinct))]
        return {
            "name": self.name,
            "num": len(matches),
            "newest": str(matches[-1]) if len(matches) else None,
            "versions": [
                {
                    "version": int(version),
                    "num": len(mine),
                    "reward": _mean(mine[np.isfinite(mine)].tolist()),
                    "best": float(np.nanmax(mine)) if np.isfinite(mine).any() else None,
                }
                for version, mine in zip(distinct.tolist(), rows, strict=True)
            ],
        }

    def prompt_text(self, id: int) -> bytes:
        """Return the prompt of a trajectory, UTF-8."""
        return self._prompt_of(id)

    def rows(self, ids: Ids, columns: Sequence[str] = ()) -> list[Answer]:
        """Return trajectories in brief, with complete texts and the values of further columns."""
        stored, num = self.stored, len(ids)
        numbers = {name: stored.scalars(name, ids) for name in (*_SCALARS.values(), *_FURTHER)}
        more = {name: _plain_list(values_of(stored, name, ids)) for name in columns}
        contexts = stored.contexts(ids)
        texts = {name: stored.texts(name, ids) for name in ("finish_reason", "prompt", "completion", "failure_reason")}
        tokens = num_completion_tokens(stored.store, ids)
        trusted = stored.scalars("reward_trusted", ids)

        def value(name: str, row: int, of: Callable[[Any], Any] = _integer) -> Any:
            column = numbers[name]
            return None if column is None else of(column[row])

        return [
            {
                "id": str(ids[row]),
                "reward": value("task_reward", row, finite),
                "advantage": value("advantage", row, finite),
                "group": value("group_id", row),
                "version": value("policy_version", row),
                "newest": value("newest_policy_version", row),
                "tokens": int(tokens[row]),
                "finish": texts["finish_reason"][row],
                "failure": texts["failure_reason"][row] or None,
                "trusted": None if trusted is None else bool(trusted[row]),
                "return": value("return", row, finite),
                "spread": value("degenerate", row, lambda flat: not flat),
                "evaluation": bool(value("evaluation", row, int)),
                "answer": _text(contexts[row].answer),
                "values": {name: values[row] for name, values in more.items()},
                "prompt": texts["prompt"][row],
                "completion": texts["completion"][row],
                "at": value("created_at", row, finite),
            }
            for row in range(num)
        ]

    def trajectory(self, id: int, *, first: int = 0, most: int | None = MOST_TOKENS) -> Answer:
        """Return all of one trajectory."""
        stored, single = self.stored, np.array([id], np.int64)
        here, arrivals = self.place_of_trajectory(id), stored.store.arrivals()
        (row,), (context,) = self.rows(single, self._named_rewards()), stored.contexts(single)
        near = [next(map(str, arrivals[max(at, 0) : at + 1].tolist()), None) for at in (here - 1, here + 1)]
        tokens = self._row("input_ids", single)
        head = stored.scalars("num_prompt_tokens", single)
        start = max(int(head[0]), 0) if head is not None else 0
        is_known = bool(masks_known(stored.store, single)[0])
        mask: list[int | None] = [0] * start + [None] * (len(tokens) - start)
        if is_known:
            mask = [int(sampled) for sampled in self._row("assistant_mask", single)]
        spans, heat = stored.rows("version_spans", single), stored.scalars("temperature", single)
        meta = self.stored.texts("meta", single)[0]
        data = json.loads(meta) if meta else {}
        messages, encoded = data.get("messages"), data.get("encoded")
        encoder = str(encoded.get("tokenizer", "")) if isinstance(encoded, dict) else ""
        part = slice(first, None if most is None else first + most)
        per_token = {
            name: self._per_token(column, single, part, len(tokens))
            for name, column in (
                ("log_probs", "log_probs"),
                ("ref", "ref_log_probs"),
                ("policy", "policy_log_probs"),
                ("entropy", "entropy"),
            )
        }
        return {
            **row,
            "prev": near[0],
            "next": near[1],
            "uses": (uses := uses_of(self.run, [id], row["version"])),
            "steps": [use["step"] for use in uses],
            "spans": [] if spans is None else [[int(at), int(of)] for at, of in spans[0]],
            "error": context.error,
            "components": _components(data.get("rewards")),
            "turn_rewards": self._turn_rewards(single),
            "engine": stored.texts("engine", single)[0],
            "temperature": None if heat is None else finite(heat[0]),
            "log_prob_mode": stored.texts("log_prob_mode", single)[0],
            "messages": messages if isinstance(messages, list) else None,
            "num_tokens": len(tokens),
            "prompt_tokens": start,
            "first": first,
            "ids": tokens[part],
            "pieces": self._texts.pieces(tokens, start, row["prompt"], row["completion"], encoded_by=encoder)[part],
            "mask": mask[part],
            "mask_known": is_known,
            **per_token,
            "log_probs": per_token["log_probs"] or [],
        }

    def _named_rewards(self) -> list[str]:
        return [field["name"] for field in fields_of(self.stored) if is_named_reward(field["name"])]

    def place_of_trajectory(self, id: int) -> int:
        """Return the position of a trajectory in the order of arrival."""
        arrivals = self.stored.store.arrivals()
        position = arrivals.position(id)
        if position is None:
            ends = [int(arrivals[at][0]) for at in (slice(0, 1), slice(-1, None))] if len(arrivals) else []
            available = f"It contains {count(len(arrivals), 'trajectory')}" + (
                f", ids {ends[0]} to {ends[1]}" if ends else ""
            )
            raise MissingKeyError(f"there is no trajectory {id} in {self.name}. {available}.")
        return position

    def _turn_rewards(self, single: Ids) -> dict[str, list[float | None]]:
        """Return the rewards per turn of a trajectory, by name."""
        names = [name for name in sorted(self.stored.columns) if name.startswith(("turn_reward_", "turn_rewards"))]
        by_name = {name: [finite(reward) for reward in self._row(name, single)] for name in names}
        return {name: values for name, values in by_name.items() if any(reward is not None for reward in values)}

    def members(self, group: int) -> Ids:
        """Return the members of a group."""
        members = rows_with(self.stored, "group_id", group)
        if not len(members):
            has_groups = "group_id" in self.stored.columns
            blocks = [
                self.stored.store.read_scalars("group_id", ids) for ids in all_rows(self.stored).parts() if has_groups
            ]
            ends = min(map(np.min, blocks), default=None), max(map(np.max, blocks), default=None)
            available = "" if ends[0] is None else f"; group ids range from {ends[0]} to {ends[1]}"
            raise MissingKeyError(f"there is no group {group} in {self.name}{available}.")
        return members

    def group(self, group: int) -> Answer:
        """Return all members of a group."""
        members = self.members(group)
        rewards, flat = self._floats("task_reward", members), self.stored.scalars("degenerate", members)
        versions = self.stored.scalars("policy_version", members)
        oldest = None if versions is None else int(versions.min())
        return {
            "group": group,
            "num": int(stored_last_rows(self.stored.store, members).sum()),
            "num_failed": int(self._lacks_reward(members).sum()),
            "reward_mean": _mean(rewards[np.isfinite(rewards)].tolist()),
            # The write path's verdict: by the returns, and by the estimator's own rule.
            "spread": None if flat is None or self._is_waiting(members) else not bool(flat.all()),
            "uses": [
                {"step": use["step"], **{what: _num(use[what]) for what in ("taught", "without_gradient")}}
                for use in uses_of(self.run, members.tolist(), oldest)
            ],
            "rows": self.rows(members[:MOST_ROWS], self._named_rewards()),
        }

    def _is_waiting(self, ids: Ids) -> bool:
        """Return whether trajectories have no advantage yet, because their group is not complete."""
        advantages = self.stored.scalars("advantage", ids)
        return advantages is None or bool(np.isnan(advantages.astype(np.float64)).all())

    def groups(self, *, newest: int = 20) -> list[Answer]:
        """Return the newest groups, newest first: number, members' rewards, mean, and the best member's text."""
        rows, newest_groups = all_rows(self.stored), dict[int, None]()
        if "group_id" not in self.stored.columns:
            return []
        end, size = len(rows), 64 * newest
        while end and len(newest_groups) < newest:
            first = max(end - size, 0)
            newest_groups |= dict.fromkeys(self.stored.store.read_scalars("group_id", rows[first:end])[::-1].tolist())
            end, size = first, min(2 * size, _BLOCK_ROWS)
        group_ids = np.array(list(newest_groups)[:newest], np.int64)
        members = rows.meeting(lambda ids: np.isin(self.stored.store.read_scalars("group_id", ids), group_ids))[:]
        members = members[stored_last_rows(self.stored.store, members)]
        of_member = self.stored.store.read_scalars("group_id", members)
        return [self._brief_group(name, members[of_member == name]) for name in group_ids.tolist()]

    def _brief_group(self, name: int, members: Ids) -> Answer:
        rewards = self._floats("task_reward", members)
        (best,) = self.rows(members[[int(np.argmax(np.where(np.isnan(rewards), -np.inf, rewards)))]])
        return {
            "group": name,
            "rewards": [finite(reward) for reward in rewards.tolist()],
            "reward_mean": _mean(rewards[np.isfinite(rewards)].tolist()),
            "best": self._cut(best),
        }

    # -- steps -------------------------------------------------------------------------------------------------------

    def batch(self, step: int) -> Ids:
        """Return the trajectories that an optimizer step learned from and that are stored still."""
        row = (self.ledger_rows().of_step(step) if self.run is not None else None) or {}
        ids = np.array(row.get("row_ids", []), np.int64)
        return ids[self.stored.store.holds(ids)] if len(ids) else ids

    def step(self, step: int, *, offset: int = 0, limit: int = 100) -> Answer:
        """Return the trajectories and metrics of an optimizer step, and the evaluations of the weights after it.

        Args:
            step: its number.
            offset: the number of groups to skip.
            limit: name at most so many groups; all counts are of the whole step.
        """
        ledger = self.ledger_rows().of_step(step) if self.run is not None else None
        figures = self.metrics_rows().of_step(step) if self.run is not None else None
        last = self.metrics_rows().last_step if self.run is not None else 0
        if ledger is None and figures is None:
            available = "it has no ledger" if self.run is None else f"the latest step is {last}"
            raise MissingKeyError(f"there is no step {step} in {self.name}: {available}.")
        row, metrics = ledger or {}, figures or {}
        present, idle = self.batch(step), row.get("no_gradient")
        groups, num = None, len(row.get("row_ids", []))
        if len(present):
            quiet = None if idle is None else np.array(idle, np.int64)
            groups = groups_of(self.stored, present, quiet, offset=offset, limit=limit)
        return {
            "step": step,
            "last": last,
            "prev": step - 1 if step > 1 else None,
            "next": step + 1 if step < last else None,
            "num": num,
            "num_gone": num - len(present),
            "num_groups": metrics.get("num_groups") or (num_groups(self.stored, present) if len(present) else 0),
            "num_taught": None if idle is None else num - len(idle),
            "left_out": {name: count for name, count in row.get("left_out", {}).items() if count},
            "metrics": {name: finite(figure) for name, figure in metrics.items() if figure is not None},
            "ledger": {name: recorded for name, recorded in row.items() if not isinstance(recorded, list | dict)},
            "checkpoint": self._checkpoint_of(step),
            "offset": offset,
            "num_groups_here": num_groups(self.stored, present) if len(present) else 0,
            "groups": groups or [],
            "evaluations": list(self._evaluations_of(step)),
        }

    def _checkpoint_of(self, step: int) -> Answer | None:
        """Return the checkpoint of a step, else the nearest one that is kept: `step`, `path`."""
        saved = [(int(path.name.rpartition("-")[2]), path) for path in (self.run.saved() if self.run else ())]
        if not saved:
            return None
        at, path = min(saved, key=lambda checkpoint: (abs(checkpoint[0] - step), checkpoint[0]))
        return {"step": at, "path": str(below(self.address, f"{path.parent.name}/{path.name}"))}

    # -- evaluations -------------------------------------------------------------------------------------------------

    def evaluation(self, name: str) -> View:
        """Return the view of one of the run's stores of evaluations."""
        if name not in self._evaluations:
            place = evaluation_stores(self.run).get(name) if self.run is not None else None
            if place is None or not is_store(place):
                raise MissingKeyError(f"there is no evaluation '{name}' in {self.name}.")
            self._evaluations[name] = View(place, name=f"{self.name} evaluation {name}")
        return self._evaluations[name]

    def evaluations(self) -> list[Answer]:
        """Return the evaluations of the run, one entry per store, with the figures of the steps as columns."""
        places = evaluation_stores(self.run) if self.run is not None else {}
        return [self._figures_of(name) for name, place in places.items() if is_store(place)]

    def _figures_of(self, name: str) -> Answer:
        view = self.evaluation(name)
        watermark = view.refresh()
        if name not in self._evaluated or self._evaluated[name][0] != watermark:
            recorded = {} if self.run is None else recorded_sets(self.run.config.pipeline)
            evaluations = stored_evaluations(view.stored.store, recorded.get(set_of_store(name), {}))
            newest = {step: rows_with(view.stored, "policy_version", step) for step in _steps_in(evaluations)}
            names = list(dict.fromkeys(key for evaluation in evaluations for key in evaluation if key != "step"))
            self._evaluated[name] = (
                watermark,
                {
                    "store": name,
                    "name": set_of_store(name) or None,
                    "address": str(view.address),
                    "num": len(view.stored.store),
                    "step": [evaluation["step"] for evaluation in evaluations],
                    "time": [finite(view._floats("created_at", ids).max()) for ids in newest.values()],
                    "values": {key: [finite(evaluation.get(key)) for evaluation in evaluations] for key in names},
                },
            )
        return self._evaluated[name][1]

    def _evaluations_of(self, step: int) -> Iterator[Answer]:
        """Yield the evaluations of the weights after a step: store, figures, rows."""
        for evaluation in self.evaluations():
            if step in evaluation["step"]:
                at, view = evaluation["step"].index(step), self.evaluation(evaluation["store"])
                ids = rows_with(view.stored, "policy_version", step)
                rows = [self._cut(row) for row in view.rows(ids[:_MOST_EVALUATED])]
                figures = {name: values[at] for name, values in evaluation["values"].items()}
                yield {
                    "store": evaluation["store"],
                    "name": evaluation["name"],
                    "figures": figures,
                    "num": len(ids),
                    "rows": rows,
                }

    def ledger(self, *, last: int = 20) -> list[Answer]:
        """Return the newest steps of the ledger: step, trajectories, groups, ages, watermark; oldest first.

        `grader` is the number of the step's grader, from 1, in a run that had several; see `graders`.
        """
        begins = [grader["from_step"] for grader in self.graders()]
        steps = []
        for row in self.ledger_rows()[-last:] if self.run is not None else []:
            ages = row.get("ages") or []
            used = len(row.get("row_ids", []))
            mean = _mean([float(age) for age in ages])
            scalars = {name: recorded for name, recorded in row.items() if not isinstance(recorded, list)}
            grader = {"grader": sum(first <= row["step"] for first in begins)} if begins else {}
            steps.append({**scalars, **grader, "num": used, "age_mean": mean, "age_max": max(ages, default=None)})
        return steps

    # -- counts and lists --------------------------------------------------------------------------------------------

    def stats(self, where: Sequence[str] = ()) -> Answer:
        """Return counts, rewards and lengths of the trajectories that meet conditions."""
        stored = self.stored
        among = self._meeting(self._resolved(where), None, all_rows(stored))

        def gathered(name: str) -> npt.NDArray[Any] | None:
            return among.gathered(lambda ids: stored.store.read_scalars(name, ids)) if name in stored.columns else None

        has_groups = "group_id" in stored.columns
        rewards = among.gathered(lambda ids: self._floats("task_reward", ids))
        graded = rewards[np.isfinite(rewards)]
        about: Answer = {
            "no_reward": among.count(self._lacks_reward),
            "reward_mean": finite(graded.mean()) if len(graded) else None,
            "reward_std": finite(graded.std()) if len(graded) else None,
            "reward_quantiles": [float(quantile) for quantile in np.quantile(graded, _SHARES)] if len(graded) else None,
        }
        del rewards, graded  # a column at a time
        episodes = among.meeting(lambda ids: stored_last_rows(stored.store, ids))
        groups = episodes.gathered(lambda ids: stored.store.read_scalars("group_id", ids)) if has_groups else None
        sizes = np.unique(groups, return_counts=True)[1] if groups is not None else np.zeros(0, np.int64)
        about |= {
            "groups": len(sizes),
            "group_sizes": {int(size): int((sizes == size).sum()) for size in np.unique(sizes)},
        }
        del groups, sizes, episodes
        tokens = among.gathered(lambda ids: num_completion_tokens(stored.store, ids)).astype(np.int64)
        about |= {
            "completion_tokens": int(tokens.sum()),
            "unknown_masks": among.count(lambda ids: ~masks_known(stored.store, ids)),
            "lengths": _histogram(tokens),
            "length_quantiles": [float(quantile) for quantile in np.quantile(tokens, _SHARES)] if len(tokens) else None,
        }
        del tokens
        prompts, versions = gathered("num_prompt_tokens"), gathered("policy_version")
        return {
            "trajectories": len(among),
            **about,
            "prompt_tokens": None if prompts is None else int(prompts.sum(dtype=np.int64)),
            "versions": None if versions is None or not len(among) else [int(versions.min()), int(versions.max())],
            "num_versions": 0 if versions is None else len(np.unique(versions)),
            "finish": text_counts(stored, "finish_reason", among),
        }

    def fields(self) -> list[Answer]:
        """Return the columns that trajectories can be shown, ordered and filtered by."""
        return fields_of(self.stored)

    def facets(
        self,
        where: Sequence[str] = (),
        *,
        text: str = "",
        column: str = "completion",
        prompt_of: int | None = None,
        snapshot: int | None = None,
    ) -> Answer:
        """Return how many of the trajectories that `trajectories` finds are of each kind, each with its condition.

        With a text, of those that its search has found so far.
        """
        among, where = self._rows(snapshot), self._resolved(where)
        if text:
            among = self._search(text, column, where, prompt_of, among, snapshot).matches
        else:
            among = self._meeting(where, prompt_of, among)
        kinds = [
            ("no reward", "task_reward==nan"),
            ("reward 1 or more", "reward>=1"),
            ("reward 0 or less", "reward<=0"),
        ]
        if "reward_trusted" in self.stored.columns:
            kinds.append(("untrusted", "reward_trusted==false"))
        if "degenerate" in self.stored.columns:
            kinds.append(("no spread in its group", "degenerate==true"))
        counted = [
            {"name": name, "where": text, "num": among.count(partial(meets, self.stored.store, [text]))}
            for name, text in kinds
            if "reward" not in text or "task_reward" in self.stored.columns
        ]
        reasons = text_counts(self.stored, "finish_reason", among).items()
        counted += [
            {"name": name, "where": condition_on("finish_reason", "==", name), "num": num}
            for name, num in reasons
            if name
        ]
        if (notes := self._notes) is not None:
            counted += [{"name": name, "where": condition, "num": num} for name, condition, num in notes.counts(among)]
        return {"kinds": [kind for kind in counted if kind["num"]]}

    def list(self, name: str, *, cause: str = "", offset: int = 0) -> Answer:
        """Return one of the lists: `failed`, `untrusted`, `drift`, `mismatch`.

        The first two count all their trajectories by cause, and have a page of them, the newest first, of one cause if
        that is named.
        """
        if name not in LISTS:
            raise MissingKeyError(f"there is no list '{name}'; the lists are {', '.join(LISTS)}.")
        if name == "drift":
            versions, num = self._by_version()
            return {"list": name, "versions": versions, "num_versions": num}
        if name == "mismatch":
            rows = self.metrics_rows().spread(2000) if len(self.metrics_rows()) else []
            compared = [row for row in rows if row.get("sampler_gap") is not None]
            worst = sorted(compared, key=lambda row: -row["sampler_gap"])[:50]
            steps = [{"step": row["step"], "gap": row["sampler_gap"]} for row in worst]
            return {"list": name, "steps": steps, "looked": len(rows), "num_steps": len(self.metrics_rows())}
        bad = all_rows(self.stored).meeting(self._lacks_reward if name == "failed" else self._is_untrusted)[:]
        causes = self._causes[name]
        causes.update(self.stored, bad)
        matches = causes.of(cause) if cause else bad
        newest = matches[::-1][offset : offset + _LISTED]
        errors = messages(self.stored, newest)
        rows = [
            {**self._cut(row), "error": error, "cause": cause_of(error)}
            for row, error in zip(self.rows(newest), errors, strict=True)
        ]
        return {
            "list": name,
            "num": len(bad),
            "num_kinds": causes.num,
            "kinds": causes.answer(),
            "cause": cause or None,
            "matched": len(matches),
            "offset": offset,
            "rows": rows,
        }

    def _by_version(self) -> tuple[list[Answer], int]:
        """Return reward and length by policy version, at most 200 evenly spaced ones, and how many there are."""
        sums = by_version(self.stored, _MOST_VERSIONS)
        versions = [
            {
                "version": int(sums.versions[at]),
                "num": int(sums.num[at]),
                "reward": finite(sums.rewards[at] / sums.graded[at]) if sums.graded[at] else None,
                "tokens": float(sums.tokens[at] / sums.num[at]),
            }
            for at in range(len(sums.versions))
        ]
        return versions, sums.num_versions

    # -- parts -------------------------------------------------------------------------------------------------------

    def metrics_rows(self) -> Any:
        """Return the current rows of the metrics, `StepRows`; empty for a store alone."""
        return self.run.rows(self.run.metrics_file) if self.run is not None else ()

    def ledger_rows(self) -> Any:
        """Return the current rows of the ledger, `StepRows`; empty for a store alone."""
        return self.run.rows(self.run.ledger_file) if self.run is not None else ()

    def _rows(self, snapshot: int | None) -> MatchingRows:
        """Return all rows, or those of an earlier watermark."""
        arrivals = self.stored.store.arrivals()
        if snapshot is not None:
            evicted = self.stored.store.watermark - len(arrivals)
            arrivals = arrivals.between(0, max(snapshot - evicted, 0))
        return MatchingRows(arrivals)

    def _floats(self, name: str, ids: Ids) -> npt.NDArray[np.float64]:
        values = self.stored.scalars(name, ids)
        return np.full(len(ids), np.nan) if values is None else values.astype(np.float64)

    def _lacks_reward(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Return which rows have no reward; of an episode of several rows only the last one has it."""
        return np.isnan(self._floats("task_reward", ids)) & stored_last_rows(self.stored.store, ids)

    def _is_untrusted(self, ids: Ids) -> npt.NDArray[np.bool_]:
        trusted = self.stored.scalars("reward_trusted", ids)
        return np.zeros(len(ids), bool) if trusted is None else ~trusted.astype(np.bool_)

    def _cut(self, row: Answer, text: str = "", column: str = "completion") -> Answer:
        """Return a row with texts cut for a table, around the hit of a search."""
        short = {}
        for name, most in (("prompt", 200), ("completion", 300)):
            at = row[name].lower().find(text.lower()) if text and name == column else 0
            begin = max(at - _EARLIER, 0)
            short[name] = ("…" if begin else "") + row[name][begin : begin + most]
        return row | short

    def _row(self, name: str, single: Ids) -> list[Any]:
        rows = self.stored.rows(name, single)
        return [] if rows is None else rows[0].tolist()

    def _per_token(self, name: str, single: Ids, part: slice, num: int) -> list[float | None] | None:
        """Return a column's values at places; None if it has none for this trajectory, where it reads as NaN."""
        values = [finite(value) for value in self._row(name, single)]
        return values[part] if len(values) == num and any(value is not None for value in values) else None


def condition_on(column: str, sign: str, text: str) -> str:
    """Return the condition that compares a column with a text, whatever characters the text has.

    >>> condition_on("finish_reason", "==", "3"), condition_on("finish_reason", "==", "a and b")
    ('finish_reason=="3"', 'finish_reason=="a and b"')
    """
    return f"{column}{sign}{json.dumps(text, ensure_ascii=False)}"


def finite(value: Any) -> Any:
    """Return a number that JSON can represent; None if it is not finite."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return float(value) if math.isfinite(value) else None


def _plain_list(values: Any) -> Sequence[Any]:
    """Return values as JSON holds them."""
    return [finite(value) for value in (values if isinstance(values, list) else values.tolist())]


def _steps_in(evaluations: Sequence[Answer]) -> list[int]:
    return [evaluation["step"] for evaluation in evaluations]


def _num(ids: Sequence[str] | None) -> int | None:
    return None if ids is None else len(ids)


def _components(components: Any) -> dict[str, dict[str, float | None]]:
    """Return the components of rewards that a trajectory has, by the name of the reward."""
    if not isinstance(components, dict):
        return {}
    return {
        str(name): {str(part): finite(figure) for part, figure in parts.items() if isinstance(figure, int | float)}
        for name, parts in components.items()
        if isinstance(parts, dict)
    }


def _end_of(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - _LOG_BYTES, 0))
        return stream.read().decode("utf-8", "replace")


def _text(value: Any) -> str | None:
    """Return an answer as text; JSON for what is not text."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _integer(value: Any) -> int | None:
    return None if value < 0 else int(value)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _histogram(lengths: Ids) -> list[list[int]]:
    """Return at most eight buckets of equal width: smallest, largest, how many."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BARS)
    nums = np.bincount((lengths - low) // width).tolist()
    return [[low + at * width, min(low + (at + 1) * width - 1, high), num] for at, num in enumerate(nums)]
