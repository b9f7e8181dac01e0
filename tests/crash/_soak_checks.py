"""What a run that was killed again and again must show, from its stores, its ledger and its metrics alone."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.policies.engines.sampling import stream_keys
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import StoreError, TrajectoryStore

CHECKED_COLUMNS = ("input_ids", "log_probs", "assistant_mask")
CHECKED_SCALARS = ("trajectory_id", "group_id", "policy_version", "task_reward")
LAST_ROLLOUTS = 20
GOAL = 0.9


def mean_reward(metrics: list[dict[str, Any]]) -> float:
    """Return the mean reward of the last rollouts that a run learned from; 0 before the first."""
    rewards = [row["task_reward"] for row in metrics if "task_reward" in row]
    return float(np.mean(rewards[-LAST_ROLLOUTS:])) if rewards else 0.0


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    what: str
    found: str
    met: bool | None
    """None where there is no goal."""
    details: str = ""
    """What a reader needs if it is missed."""

    def __str__(self) -> str:
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"{self.what:<72} {self.found:>24}  {verdict}"


class Witness:
    """Remembers every rollout that was acknowledged while the run went on: its ids and a checksum of its content."""

    def __init__(self, run_dir: Path, prompts_per_rollout: int) -> None:
        self.run_dir = run_dir
        self.size = prompts_per_rollout
        self.seen: dict[int, tuple[tuple[int, ...], int]] = {}

    def look(self) -> None:
        """Take in what has been acknowledged since the last look: a rollout's row is written after its trajectories."""
        try:
            with (
                TrajectoryStore.open(self.run_dir / "rollouts") as rollouts,
                TrajectoryStore.open(self.run_dir / "store") as store,
            ):
                new = [r for r in rollouts.read_scalars("rollout").tolist() if r not in self.seen]
                store.refresh()
                self.seen |= self.fingerprints(store, new)
        except (StoreError, FileNotFoundError):
            if self.seen:
                raise  # the stores were there; before that they may be in the making

    def fingerprints(self, store: TrajectoryStore, rollouts: list[int]) -> dict[int, tuple[tuple[int, ...], int]]:
        """Return the ids and the checksum of each of these rollouts."""
        ids = store.ids()  # of one moment: a read that follows a merge also finds newer rows
        groups = store.read_scalars("group_id", ids)
        latest = {}
        for rollout in rollouts:
            mine = ids[groups // self.size == rollout]
            crc = 0
            for name in CHECKED_SCALARS:
                crc = zlib.crc32(np.ascontiguousarray(store.read_scalars(name, mine)).tobytes(), crc)
            for name in CHECKED_COLUMNS:
                ragged = store.read_ragged(name, mine)
                crc = zlib.crc32(np.ascontiguousarray(ragged.values).tobytes(), crc)
                crc = zlib.crc32(np.asarray(ragged.lengths, np.int64).tobytes(), crc)
            latest[rollout] = (tuple(mine.tolist()), crc)
        return latest


def check_run(run_dir: Path, pipeline: Pipeline, witness: Witness, *, goal: bool = True) -> list[Line]:
    """Count prompts, trajectories, rollouts and steps, and compare what was acknowledged with what is there."""
    size, members = pipeline.collect.prompts_per_rollout, pipeline.collect.group_size
    updates = pipeline.learn.steps_per_rollout
    ledger, metrics = list(StepRows(run_dir / "ledger.jsonl")), list(StepRows(run_dir / "metrics.jsonl"))
    steps = metrics[-1]["step"]
    with TrajectoryStore.open(run_dir / "store") as store, TrajectoryStore.open(run_dir / "rollouts") as rollouts:
        verified = [store.verify().ok, rollouts.verify().ok]
        ids = store.ids()
        trajectory_ids, groups = store.read_scalars("trajectory_id"), store.read_scalars("group_id")
        stored = rollouts.read_scalars("rollout")
        now = witness.fingerprints(store, list(witness.seen))
        prompts_wrong = _wrong_prompts(store, pipeline, json.loads((run_dir / "config.json").read_text())["seed"])
    group_ids, counts = np.unique(groups, return_counts=True)
    expected = int(group_ids[-1]) + 1 if len(group_ids) else 0
    lost = expected - len(group_ids) + int((counts < members).sum())
    repeated = int((counts > members).sum()) + len(trajectory_ids) - len(np.unique(trajectory_ids))
    learned = [row["rollout"] for row in ledger]
    begun, times = np.unique(learned, return_counts=True)
    waiting = set(stored.tolist()) - set(learned)
    used = np.concatenate([np.asarray(row["row_ids"], np.int64) for row in ledger])
    used_ids, used_times = np.unique(used, return_counts=True)
    ages = [age for row in ledger for age in (min(row["ages"]), max(row["ages"]))]
    changed = sum(now[rollout] != was for rollout, was in witness.seen.items())
    last = mean_reward(metrics)
    return [
        Line("prompts lost (a group that is not there, or not whole)", f"{lost} of {expected:,}", lost == 0),
        Line("prompts or trajectories repeated", f"{repeated}", repeated == 0),
        Line("prompts that are not the definition's (of those compared)", f"{prompts_wrong}", prompts_wrong == 0),
        Line(
            "rollouts: a row for each, once",
            f"{len(stored):,}",
            sorted(stored.tolist()) == list(range(expected // size)),
        ),
        Line(
            "acknowledged rollouts seen on the way, lost or changed",
            f"{changed} of {len(witness.seen):,}",
            changed == 0 and len(witness.seen) > 0,
        ),
        Line("ledger: every step once", f"{len(ledger):,}", [r["step"] for r in ledger] == list(range(1, steps + 1))),
        Line(
            "metrics: every step once", f"{len(metrics):,}", [r["step"] for r in metrics] == list(range(1, steps + 1))
        ),
        Line(
            f"rollouts learned {updates} time(s), one after the other",
            f"{len(begun):,}",
            bool((times == updates).all())
            and all(len(set(learned[at : at + updates])) == 1 for at in range(0, len(learned), updates)),
        ),
        Line(
            "trajectories learned more often",
            f"{int((used_times > updates).sum())}",
            bool((used_times <= updates).all()),
        ),
        Line(
            "trajectories that the ledger names and the store lacks",
            f"{int((~np.isin(used_ids, ids)).sum())}",
            bool(np.isin(used_ids, ids).all()),
        ),
        Line(
            "rollouts stored and not learned from yet",
            f"{len(waiting)}",
            len(waiting) <= pipeline.buffer.max_staleness + 1 and set(learned) <= set(stored.tolist()),
        ),
        Line(
            "oldest trajectory in a step (optimizer steps)",
            f"{max(ages)}",
            min(ages) >= 0 and max(ages) <= pipeline.buffer.max_staleness,
        ),
        Line("verify: store, rollouts", f"{verified}", all(verified)),
        Line(
            f"reward, mean of the last {LAST_ROLLOUTS} rollouts (goal {GOAL})",
            f"{last:.3f}",
            last >= GOAL if goal else None,
        ),
    ]


def check_effects(run_dir: Path, pipeline: Pipeline, notes: Path) -> list[Line]:
    """Compare what conversations with effects noted when they began and ended with what was stored by then.

    A process that begins a group begins those of its members that are not stored, and no other. What was killed between
    the end of a conversation and its commit is begun again, which nothing but the effect itself could tell.
    """
    members = pipeline.collect.group_size
    with TrajectoryStore.open(run_dir / "store") as store:
        groups, stored_at = store.read_scalars("group_id"), store.read_scalars("created_at")
    run_seed = json.loads((run_dir / "config.json").read_text())["seed"]
    cursors = np.arange(int(groups.max()) + 1 + 8 * pipeline.collect.prompts_per_rollout)
    keys = stream_keys(run_seed, cursors, np.full(len(cursors), -1)) >> 1  # as environments get them
    group_of = dict(zip(keys.tolist(), cursors.tolist(), strict=True))
    begun: dict[tuple[int, int], list[float]] = {}
    ended: Counter[int] = Counter()
    for line in notes.read_text().splitlines():
        word, pid, at, seed = line.split()
        if word == "begins":
            begun.setdefault((int(pid), group_of[int(seed)]), []).append(float(at))
        else:
            ended[group_of[int(seed)]] += 1
    wrong = again = 0
    for (_, group), times in begun.items():
        before = int((stored_at[groups == group] < min(times)).sum())
        wrong += len(times) + before != members
        again += before > 0
    lost = sum(ended[group] < number for group, number in Counter(groups.tolist()).items())
    return [
        Line("groups begun, of them after a kill with members stored", f"{len(begun):,}, {again}", None),
        Line("groups whose finished conversations were begun again, or others not", f"{wrong}", wrong == 0),
        Line("groups with more conversations stored than ended", f"{lost}", lost == 0),
        Line("conversations killed between their end and their commit", f"{ended.total() - len(groups)}", None),
    ]


def _wrong_prompts(store: TrajectoryStore, pipeline: Pipeline, seed: int, num: int = 2000) -> int:
    """Count stored prompts that differ from what the source says, over the newest and some others."""
    ids, groups = store.ids(), store.read_scalars("group_id")
    chosen = np.unique(
        np.concatenate([np.arange(max(len(ids) - 512, 0), len(ids)), np.linspace(0, len(ids) - 1, num).astype(int)])
    )
    texts = store.read(ids[chosen], ["prompt"])["prompt"]
    source = pipeline.prompts
    return sum(text != source.prompt(int(group), seed).text for text, group in zip(texts, groups[chosen], strict=True))
