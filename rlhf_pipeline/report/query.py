"""All that is shown of a run, a store or files: one reader for the shell, the pages and the report, without torch.

Every answer is plain data that JSON can hold: ids are strings (JavaScript's numbers end at 2^53), and a number that is
not finite is null.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.filters import meets, num_completion_tokens, text_bytes
from rlhf_pipeline.config_text import flat_fields
from rlhf_pipeline.errors import MissingKeyError, MissingPathError
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.report.tokens import TokenTexts
from rlhf_pipeline.run.address import Address, address_of
from rlhf_pipeline.run.evaluation_rows import evaluation_stores, stored_evaluations
from rlhf_pipeline.run.folder import RunFolder, is_run, is_store, open_run_or_store, run_of_evaluation

Answer = dict[str, Any]

MOST_ROWS: Final = 500
"""Rows of one answer."""
MOST_TOKENS: Final = 4096
"""Tokens of one answer; a longer trajectory is read in windows."""
SORTS: Final = {"reward": "task_reward", "advantage": "advantage", "version": "policy_version", "group": "group_id"}
LISTS: Final = ("failed", "untrusted", "drift", "mismatch")

_FURTHER = ("newest_policy_version", "created_at", "evaluation")
_BLOCK_BYTES = 1 << 22
_BLOCK_ROWS = 1 << 16
_ENOUGH_S = 0.15
"""A search stops with a full page after this time; "search all" goes on."""
_BUDGET_S = 1.0
_MOST_LEDGER_BYTES = 1 << 26
_LOG_BYTES = 4096
_BARS = 8
_EARLIER = 40
"""Characters of a completion that are shown before a hit."""


def search(store: Any, name: str, wanted: str, ids: Ids) -> Iterator[tuple[Ids, int]]:
    """Find a text in a text column, newest rows first, straight from the stored bytes, about 4 MB at a time.

    ASCII letters of either case are equal.

    Args:
        store: an open store.
        name: a text column.
        wanted: the text; not empty.
        ids: the rows to search, in the order of arrival, [N].
    """
    needle = np.frombuffer(wanted.encode().lower(), np.uint8)
    either = (needle >= 97) & (needle <= 122)
    end, rows = len(ids), 1024
    while end:
        first = max(end - rows, 0)
        flat, starts = text_bytes(store, name, ids[first:end])
        at = _occurrences(flat, needle, either)
        row = np.searchsorted(starts, at, "right") - 1
        yield first + np.unique(row[at + len(needle) <= starts[row + 1]]), first
        rows = int(np.clip(_BLOCK_BYTES * (end - first) // max(len(flat), 1), 256, _BLOCK_ROWS))
        end = first


def _occurrences(flat: npt.NDArray[np.uint8], needle: npt.NDArray[np.uint8], either: npt.NDArray[np.bool_]) -> Ids:
    """Return where a needle begins, ascending: its rarest byte is looked for first, then the others are compared."""
    last = len(flat) - len(needle) + 1
    if last <= 0:
        return np.zeros(0, np.int64)
    often = np.bincount(flat[: 1 << 18], minlength=256)
    order = np.argsort(
        [often[byte] + (often[byte - 32] if both else 0) for byte, both in zip(needle, either, strict=True)]
    )

    def same(values: npt.NDArray[np.uint8], place: int) -> npt.NDArray[np.bool_]:
        return (values | 32 if either[place] else values) == needle[place]

    rarest = int(order[0])
    at = np.flatnonzero(same(flat[rarest : rarest + last], rarest))
    for place in order[1:].tolist():
        at = at[same(flat[at + place], place)]
    return at


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

    def close(self) -> None:
        """Close the store, and those of the evaluations."""
        for view in self._evaluations.values():
            view.close()
        if self._stored is not None:
            self._stored.store.close()

    @property
    def stored(self) -> Stored:
        """The store as it is now."""
        if self._stored is None:
            if not is_store(self._store_path):
                open_run_or_store(self.address)  # says what is missing, and what to do
            self._stored = Stored(self._store_path, whole=True)
        return self._stored

    def refresh(self) -> int:
        """See what was stored since; return the watermark, 0 if nothing is stored yet."""
        try:
            return self.stored.store.refresh()
        except MissingPathError:
            return 0

    # -- the run -----------------------------------------------------------------------------------------------------

    def about(self) -> Answer:
        """Return the run in one row: name, definition, steps, first and last reward, what is stored, processes."""
        watermark = self.refresh()
        rows = self.metrics_rows()
        ends = [row["task_reward"] for row in (*rows[:8], *rows[-8:]) if row.get("task_reward") is not None]
        pipeline = self.run.config.pipeline if self.run is not None else {}
        rewards = self._floats("task_reward") if watermark else np.zeros(0)
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
            "failed": int(np.isnan(rewards).sum()),
            "watermark": watermark,
            "updated": rows[-1].get("time") if len(rows) else None,
            "processes": self.processes(),
            "columns": sorted(self.stored.columns) if watermark else [],
        }

    def _newest_evaluation(self, pipeline: Mapping[str, Any]) -> float | None:
        """Return the mean reward of the newest evaluation that a step has in its line."""
        rows, every = self.metrics_rows(), (pipeline.get("evaluate") or {}).get("every")
        row = rows.of_step(rows[-1]["step"] // every * every) if every and len(rows) else None
        return (row or {}).get("evaluation/reward")

    def processes(self) -> list[Answer]:
        """Return the processes of a run of several, as each last said of itself."""
        if self.run is None or not self.run.processes.is_dir():
            return []
        found = []
        for file in sorted(self.run.processes.glob("*.json")):
            said = self.run.heartbeat_of(file.stem)
            if said:
                alive = self.run.is_alive(file.stem)
                found.append({**said, "name": file.stem, "seen": said.get("time"), "alive": alive})
        return found

    def metrics(self, names: Sequence[str] = (), *, points: int = 600, after: int = 0) -> Answer:
        """Return figures of `metrics.jsonl` as columns, in evenly spaced steps."""
        rows = self.metrics_rows()
        some = [row for row in (rows.spread(points) if len(rows) else []) if row["step"] > after]
        numbers = {key for row in some[:1] + some[-1:] for key, value in row.items() if isinstance(value, int | float)}
        wanted = list(names) or sorted(numbers - {"step", "time"})
        return {
            "step": [row["step"] for row in some],
            "time": [row.get("time") for row in some],
            "values": {name: [finite(row.get(name)) for row in some] for name in wanted},
        }

    def changes(self) -> Answer:
        """Return what a page polls for: watermark, newest step, and the processes' states."""
        rows = self.metrics_rows()
        beats = [[one["name"], one.get("state"), one["seen"]] for one in self.processes()]
        return {"watermark": self.refresh(), "step": rows[-1]["step"] if len(rows) else None, "beats": beats}

    def health(self) -> Answer:
        """Return the processes, and the end of the run's log."""
        log = ""
        if self.run is not None and (file := self.run.path / "log.txt").is_file():
            with file.open("rb") as stream:
                stream.seek(max(file.stat().st_size - _LOG_BYTES, 0))
                log = stream.read().decode("utf-8", "replace")
        return {"now": time.time(), "processes": self.processes(), "log": log}

    def definition(self) -> Answer:
        """Return the definition, flat: `{"learn.lr": 0.001, ...}`; empty for a store alone."""
        if self.run is None:
            return {}
        return {name: str(value) if isinstance(value, list) else value for name, value in self._fields().items()}

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
    ) -> Answer:
        """Return a page of the trajectories that meet conditions."""
        key = sort.removeprefix("-")
        if key != "id" and key not in SORTS:
            raise MissingKeyError(f"there is no order '{sort}'. Known: id, {', '.join(SORTS)}, each with - before it.")
        began, stored = time.perf_counter(), self.stored
        ids = self._ids(snapshot)
        keep = meets(stored.store, where, ids)
        scanned = 0
        if text:
            if column not in ("completion", "prompt") or column not in stored.columns:
                raise MissingKeyError(f"{self.name} has no text column '{column}' to search in.")
            among = np.flatnonzero(keep)
            keep, wanted, scanned = np.zeros(len(ids), bool), offset + limit + 1, len(ids)
            for places, first in search(stored.store, column, text, ids[among]):
                keep[among[places]] = True
                wanted, scanned = wanted - len(places), int(among[first])
                took = time.perf_counter() - began
                full = key == "id" and sort[0] == "-" and wanted <= 0 and not everything and took > _ENOUGH_S
                if first and (full or took > _BUDGET_S):
                    break
            else:
                scanned = 0
        found = ids if keep.all() else ids[keep]
        page = self._page(found, sort, offset, min(max(limit, 1), MOST_ROWS))
        return {
            "total": len(ids),
            "matched": len(found),
            "complete": scanned == 0,
            "scanned_to": scanned,
            "offset": offset,
            "snapshot": stored.store.watermark if snapshot is None else snapshot,
            "rows": [self._cut(row, text, column) for row in self.rows(page)],
        }

    def rows(self, ids: Ids) -> list[Answer]:
        """Return trajectories in brief, with whole texts."""
        stored, num = self.stored, len(ids)
        numbers = {name: stored.scalars(name, ids) for name in (*SORTS.values(), *_FURTHER)}
        texts = {name: stored.texts(name, ids) for name in ("finish_reason", "prompt", "completion", "failure_reason")}
        tokens = num_completion_tokens(stored.store, ids)
        trusted = stored.scalars("reward_trusted", ids)

        def value(name: str, row: int, of: Callable[[Any], Any] = _whole_number) -> Any:
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
                "evaluation": bool(value("evaluation", row)),
                "prompt": texts["prompt"][row],
                "completion": texts["completion"][row],
                "at": value("created_at", row, finite),
            }
            for row in range(num)
        ]

    def trajectory(self, id: int, *, first: int = 0, most: int | None = MOST_TOKENS) -> Answer:
        """Return all of one trajectory."""
        stored, one = self.stored, np.array([id], np.int64)
        ids = stored.ids()
        here = np.flatnonzero(ids == id)
        if not len(here):
            known = f"It has {len(ids):,}" + (f", from id {ids[0]} to {ids[-1]}" if len(ids) else "")
            raise MissingKeyError(f"there is no trajectory {id} in {self.name}. {known}.")
        (row,), (context,) = self.rows(one), stored.contexts(one)
        near = [str(ids[at]) if 0 <= at < len(ids) else None for at in (here[0] - 1, here[0] + 1)]
        tokens = self._row("input_ids", one)
        head = stored.scalars("num_prompt_tokens", one)
        start = max(int(head[0]), 0) if head is not None else 0
        mask = self._row("assistant_mask", one)  # one that was left out reads as False
        mask = mask if any(mask) else [0] * start + [1] * (len(tokens) - start)
        spans, heat = stored.rows("version_spans", one), stored.scalars("temperature", one)
        meta = self.stored.texts("meta", one)[0]
        data = json.loads(meta) if meta else {}
        messages, encoded = data.get("messages"), data.get("encoded")
        encoder = str(encoded.get("tokenizer", "")) if isinstance(encoded, dict) else ""
        part = slice(first, None if most is None else first + most)
        per_token = {
            name: self._per_token(column, one, part, len(tokens))
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
            "steps": self.steps_of(id, row["version"]),
            "spans": [] if spans is None else [[int(at), int(of)] for at, of in spans[0]],
            "answer": _text(context.answer),
            "error": context.error,
            "engine": stored.texts("engine", one)[0],
            "temperature": None if heat is None else finite(heat[0]),
            "log_prob_mode": stored.texts("log_prob_mode", one)[0],
            "messages": messages if isinstance(messages, list) else None,
            "num_tokens": len(tokens),
            "prompt_tokens": start,
            "first": first,
            "ids": tokens[part],
            "pieces": self._texts.pieces(tokens, start, row["prompt"], row["completion"], encoded_by=encoder)[part],
            "mask": [int(own) for own in mask[part]],
            **per_token,
            "log_probs": per_token["log_probs"] or [],
        }

    def members(self, group: int) -> Ids:
        """Return the members of a group."""
        groups = self.stored.scalars("group_id")
        found = self.stored.ids()[groups == group] if groups is not None else np.zeros(0, np.int64)
        if not len(found):
            known = "" if groups is None or not len(groups) else f"; groups go from {groups.min()} to {groups.max()}"
            raise MissingKeyError(f"there is no group {group} in {self.name}{known}.")
        return found

    def group(self, group: int) -> Answer:
        """Return all members of a group."""
        found = self.members(group)
        rows = self.rows(found[:MOST_ROWS])
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        return {"group": group, "num": len(found), "reward_mean": _mean(rewards), "rows": rows}

    def groups(self, *, newest: int = 20) -> list[Answer]:
        """Return the newest groups, newest first: number, members' rewards, mean, and the best member's text."""
        ids = self.stored.ids()[-64 * newest :]
        names = self.stored.scalars("group_id", ids)
        found: list[Answer] = []
        for name in list(dict.fromkeys(names.tolist()[::-1]))[:newest] if names is not None else []:
            rows = self.rows(ids[names == name])
            best = max(rows, key=lambda row: -math.inf if row["reward"] is None else row["reward"])
            rewards = [row["reward"] for row in rows]
            mean = _mean([reward for reward in rewards if reward is not None])
            found.append({"group": name, "rewards": rewards, "reward_mean": mean, "best": self._cut(best)})
        return found

    # -- steps -------------------------------------------------------------------------------------------------------

    def batch(self, step: int) -> Ids:
        """Return the trajectories that an optimizer step learned from and that are stored still."""
        row = (self.ledger_rows().of_step(step) if self.run is not None else None) or {}
        ids = np.array(row.get("row_ids", []), np.int64)
        return ids[self.stored.store.holds(ids)] if len(ids) else ids

    def step(self, step: int) -> Answer:
        """Return what an optimizer step learned from, its figures, and the evaluations of the weights behind it."""
        ledger = self.ledger_rows().of_step(step) if self.run is not None else None
        figures = self.metrics_rows().of_step(step) if self.run is not None else None
        if ledger is None and figures is None:
            known = "it has no ledger" if self.run is None else f"the newest is {self.metrics_rows().last_step}"
            raise MissingKeyError(f"there is no step {step} in {self.name}: {known}.")
        ids = np.array((ledger or {}).get("row_ids", []), np.int64)
        there = self.batch(step)
        rows = [self._cut(row) for row in self.rows(there[:MOST_ROWS])]
        return {
            "step": step,
            "last": self.metrics_rows().last_step,
            "num": len(ids),
            "num_gone": len(ids) - len(there),
            "metrics": {name: finite(value) for name, value in (figures or {}).items() if value is not None},
            "ledger": {name: value for name, value in (ledger or {}).items() if not isinstance(value, list)},
            "rows": rows,
            "evaluations": list(self._evaluations_of(step)),
        }

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
            success_at = float(self._fields().get("evaluate.success_at", 1.0))
            found = stored_evaluations(view.stored.store, success_at)
            versions, times = view.stored.scalars("policy_version"), view._floats("created_at")
            names = list(dict.fromkeys(key for one in found for key in one if key != "step"))
            self._evaluated[name] = (
                watermark,
                {
                    "store": name,
                    "address": str(view.address),
                    "num": len(view.stored.ids()),
                    "step": [one["step"] for one in found],
                    "time": [finite(times[versions == one["step"]].max()) for one in found],
                    "values": {key: [finite(one.get(key)) for one in found] for key in names},
                },
            )
        return self._evaluated[name][1]

    def _evaluations_of(self, step: int) -> Iterator[Answer]:
        """Yield the evaluations of the weights after a step: store, figures, rows."""
        for found in self.evaluations():
            if step in found["step"]:
                at, view = found["step"].index(step), self.evaluation(found["store"])
                rows = view.rows(view.stored.ids()[view.stored.scalars("policy_version") == step][:MOST_ROWS])
                figures = {name: values[at] for name, values in found["values"].items()}
                yield {"store": found["store"], "figures": figures, "rows": [self._cut(row) for row in rows]}

    def steps_of(self, id: int, version: int | None = None) -> list[int]:
        """Return the steps that learned from a trajectory; the ledger is read from the version that sampled it on."""
        if self.run is None:
            return []
        ledger = self.ledger_rows()
        if not len(ledger):
            return []
        replay = self.run.config.pipeline.get("replay")
        age = self.run.config.pipeline.get("buffer", {}).get("max_staleness")
        place = None if replay or version is None else ledger.place_of(version + 1)
        last = len(ledger) if place is None or age is None else min(place + age + 2, len(ledger))
        begin, end = (ledger.start_of(ledger[0]["step"] + at) for at in (place or 0, last))
        with self.run.ledger_file.open("rb") as file:
            file.seek(begin)
            data = file.read(min(end - begin, _MOST_LEDGER_BYTES))
        name = re.compile(rb'"row_ids": ?\[[\d, ]*?(?<!\d)%d(?!\d)' % id)
        return [json.loads(line)["step"] for line in data.split(b"\n") if name.search(line)]

    def ledger(self, *, last: int = 20) -> list[Answer]:
        """Return the newest steps of the ledger: step, trajectories, groups, ages, watermark; oldest first."""
        found = []
        for row in self.ledger_rows()[-last:] if self.run is not None else []:
            ages = row.get("ages") or []
            used = len(row.get("row_ids", []))
            mean = _mean([float(age) for age in ages])
            kept = {name: value for name, value in row.items() if not isinstance(value, list)}
            found.append({**kept, "num": used, "age_mean": mean, "age_max": max(ages, default=None)})
        return found

    # -- counts and lists --------------------------------------------------------------------------------------------

    def stats(self, where: Sequence[str] = ()) -> Answer:
        """Return counts, rewards and lengths of the trajectories that meet conditions."""
        stored = self.stored
        ids = self._ids(None)
        ids = ids[meets(stored.store, where, ids)]
        rewards, groups = self._floats("task_reward", ids), stored.scalars("group_id", ids)
        known = rewards[np.isfinite(rewards)]
        versions, prompts = stored.scalars("policy_version", ids), stored.scalars("num_prompt_tokens", ids)
        tokens = num_completion_tokens(stored.store, ids)
        sizes = np.unique(groups, return_counts=True)[1] if groups is not None else np.zeros(0, np.int64)
        shares = (0.0, 0.25, 0.5, 0.75, 1.0)
        return {
            "trajectories": len(ids),
            "groups": len(sizes),
            "group_sizes": {int(size): int((sizes == size).sum()) for size in np.unique(sizes)},
            "no_reward": len(rewards) - len(known),
            "reward_mean": finite(known.mean()) if len(known) else None,
            "reward_std": finite(known.std()) if len(known) else None,
            "reward_quantiles": [float(value) for value in np.quantile(known, shares)] if len(known) else None,
            "prompt_tokens": None if prompts is None else int(prompts.sum(dtype=np.int64)),
            "completion_tokens": int(tokens.sum()),
            "lengths": _histogram(tokens),
            "length_quantiles": [float(value) for value in np.quantile(tokens, shares)] if len(tokens) else None,
            "versions": None if versions is None or not len(ids) else [int(versions.min()), int(versions.max())],
            "num_versions": 0 if versions is None else len(np.unique(versions)),
            "finish": self._counts("finish_reason", ids),
        }

    def facets(self, where: Sequence[str] = ()) -> Answer:
        """Return how many of the trajectories that meet conditions are of each kind, each with its condition."""
        ids = self._ids(None)
        ids = ids[meets(self.stored.store, where, ids)]
        kinds = [
            ("no reward", "task_reward==nan"),
            ("reward 1 or more", "reward>=1"),
            ("reward 0 or less", "reward<=0"),
        ]
        if "reward_trusted" in self.stored.columns:
            kinds.append(("untrusted", "reward_trusted==false"))
        if "degenerate" in self.stored.columns:
            kinds.append(("no spread in its group", "degenerate==true"))
        found = [
            {"name": name, "where": text, "num": int(meets(self.stored.store, [text], ids).sum())}
            for name, text in kinds
            if "reward" not in text or "task_reward" in self.stored.columns
        ]
        reasons = self._counts("finish_reason", ids).items()
        found += [{"name": name, "where": f"finish_reason=={name}", "num": num} for name, num in reasons if name]
        return {"kinds": [kind for kind in found if kind["num"]]}

    def list(self, name: str) -> Answer:
        """Return one of the lists: `failed`, `untrusted`, `drift`, `mismatch`."""
        if name not in LISTS:
            raise MissingKeyError(f"there is no list '{name}'. Known: {', '.join(LISTS)}.")
        if name == "drift":
            return {"list": name, "versions": self._by_version()}
        if name == "mismatch":
            rows = self.metrics_rows().spread(2000) if len(self.metrics_rows()) else []
            known = [row for row in rows if row.get("sampler_gap") is not None]
            worst = sorted(known, key=lambda row: -row["sampler_gap"])[:50]
            return {"list": name, "steps": [{"step": row["step"], "gap": row["sampler_gap"]} for row in worst]}
        ids = self.stored.ids()
        trusted = self.stored.scalars("reward_trusted")
        bad = np.isnan(self._floats("task_reward")) if name == "failed" else np.zeros(len(ids), bool)
        if name == "untrusted" and trusted is not None:
            bad = ~trusted
        found = ids[bad]
        newest = found[::-1][:MOST_ROWS]
        errors = [context.error for context in self.stored.contexts(newest)]
        rows = [{**self._cut(row), "error": error} for row, error in zip(self.rows(newest), errors, strict=True)]
        kinds = Counter(re.sub(r"\d+", "#", row["error"] or row["failure"] or row["finish"]) for row in rows)
        return {"list": name, "num": len(found), "kinds": kinds.most_common(50), "rows": rows}

    def _by_version(self) -> list[Answer]:
        """Return reward and length by policy version, at most 200 evenly spaced ones."""
        versions = self.stored.scalars("policy_version")
        if versions is None or not len(versions):
            return []
        rewards, lengths = self._floats("task_reward"), self.stored.store.lengths("input_ids")
        known, place, num = np.unique(versions, return_inverse=True, return_counts=True)
        graded = np.isfinite(rewards)
        sums = np.bincount(place, np.where(graded, rewards, 0.0))
        counts, tokens = np.bincount(place, graded), np.bincount(place, lengths)
        some = np.unique(np.linspace(0, len(known) - 1, min(200, len(known))).round().astype(int))
        return [
            {
                "version": int(known[at]),
                "num": int(num[at]),
                "reward": finite(sums[at] / counts[at]) if counts[at] else None,
                "tokens": float(tokens[at] / num[at]),
            }
            for at in some
        ]

    # -- parts -------------------------------------------------------------------------------------------------------

    def metrics_rows(self) -> Any:
        """Return the rows of the metrics as they are now, `StepRows`; empty for a store alone."""
        return self.run.rows(self.run.metrics_file) if self.run is not None else ()

    def ledger_rows(self) -> Any:
        """Return the rows of the ledger as they are now, `StepRows`; empty for a store alone."""
        return self.run.rows(self.run.ledger_file) if self.run is not None else ()

    def _ids(self, snapshot: int | None) -> Ids:
        ids = self.stored.ids()
        return ids if snapshot is None else ids[: max(snapshot - (self.stored.store.watermark - len(ids)), 0)]

    def _floats(self, name: str, ids: Ids | None = None) -> npt.NDArray[np.float64]:
        values = self.stored.scalars(name, ids)
        num = len(self.stored.ids() if ids is None else ids)
        return np.full(num, np.nan) if values is None else values.astype(np.float64)

    def _counts(self, name: str, ids: Ids) -> dict[str, int]:
        """Count a text column's values by their bytes."""
        found: Counter[bytes] = Counter()
        for first in range(0, len(ids) if name in self.stored.columns else 0, _BLOCK_ROWS):
            flat, starts = text_bytes(self.stored.store, name, ids[first : first + _BLOCK_ROWS])
            lengths = np.diff(starts)
            for length in np.unique(lengths).tolist():
                rows = flat[starts[:-1][lengths == length, None] + np.arange(length)]
                texts = np.ascontiguousarray(rows).view(f"V{length}").ravel() if length else np.zeros(0, "V1")
                found[b""] += 0 if length else int((lengths == 0).sum())
                for text, num in zip(*np.unique(texts, return_counts=True), strict=True):
                    found[text.tobytes()] += int(num)
        return {text.decode("utf-8", "replace"): num for text, num in found.most_common(50) if num}

    def _page(self, ids: Ids, sort: str, offset: int, limit: int) -> Ids:
        """Return a page of ids in an order; only as much is sorted as the page needs. NaN comes last."""
        key, down = sort.removeprefix("-"), sort[0] == "-"
        if key == "id":
            return (ids[::-1] if down else ids)[offset : offset + limit]
        values = self._floats(SORTS[key], ids)
        values = np.where(np.isnan(values), np.inf, -values if down else values)
        top = min(offset + limit, len(ids))
        near = np.arange(len(ids))
        if 0 < top < len(ids):
            bound = np.partition(values, top - 1)[top - 1]
            below = np.flatnonzero(values < bound)
            near = np.sort(np.concatenate([below, np.flatnonzero(values == bound)[: top - len(below)]]))
        return ids[near[np.argsort(values[near], kind="stable")]][offset : offset + limit]

    def _cut(self, row: Answer, text: str = "", column: str = "completion") -> Answer:
        """Return a row with texts cut for a table, around the hit of a search."""
        short = {}
        for name, most in (("prompt", 200), ("completion", 300)):
            at = row[name].lower().find(text.lower()) if text and name == column else 0
            begin = max(at - _EARLIER, 0)
            short[name] = ("…" if begin else "") + row[name][begin : begin + most]
        return row | short

    def _row(self, name: str, one: Ids) -> list[Any]:
        rows = self.stored.rows(name, one)
        return [] if rows is None else rows[0].tolist()

    def _per_token(self, name: str, one: Ids, part: slice, num: int) -> list[float | None] | None:
        """Return a column's values at places; None if it has none for this trajectory, where it reads as NaN."""
        values = [finite(value) for value in self._row(name, one)]
        return values[part] if len(values) == num and any(value is not None for value in values) else None


def finite(value: Any) -> Any:
    """Return a number that JSON can hold; None if it is not finite."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return float(value) if math.isfinite(value) else None


def _text(value: Any) -> str | None:
    """Return an answer as text; JSON for what is no text."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _whole_number(value: Any) -> int | None:
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
