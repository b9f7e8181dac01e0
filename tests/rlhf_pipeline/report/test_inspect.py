"""Counting what is stored, and grading it again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.cli.inspect import lines
from rlhf_pipeline.data.rewards import token_match
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.report.inspect import Inspection, Tally, histogram, inspect_store
from rlhf_pipeline.report.stored import Stored
from rlhf_pipeline.report.tail import Tail
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store import Column, Schema, TrajectoryStore

from .conftest import write_run


def inspect(folder: Path, reward: Any = token_match) -> Inspection:
    """Inspect a run with a reward function."""
    run = RunFolder.open(folder)
    with Stored(run.store_path) as stored:
        return inspect_store(stored, run=run, reward=reward)


def test_counts(run_dir: Path):
    """Trajectories, groups, tokens and versions are counted: 6 rollouts, 2 prompts, 4 completions, 5 + 4 tokens."""
    found = inspect(run_dir)
    assert (found.num_trajectories, found.num_groups, found.group_sizes) == (48, 12, {4: 12})
    assert (found.num_prompt_tokens, found.num_completion_tokens) == (240, 192)
    assert found.completion_lengths == ((4, 4, 48),)
    assert found.policy_versions == (0, 10, 6)
    assert found.finish_reasons == {"length": 48}
    assert found.num_steps == 12
    assert found.last_reward == 1.0


def test_edited_curve_is_noticed(run_dir: Path):
    """A point of the curve that was edited by 0.001 is found; the trajectories still agree."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4]["task_reward"] += 0.001
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check = inspect(run_dir).reward_check
    assert check is not None
    assert (check.num_different, check.num_rollouts_different) == (0, 1)
    assert (check.first_rollouts_different[0].step, check.first_rollouts_different[0].rollout) == (5, 2)


def test_edited_completion_is_noticed(run_dir: Path):
    """One completion overwritten on the disk is found by its reward."""
    chunk = next((run_dir / "store").rglob("completion/c/0"))
    data = bytearray(chunk.read_bytes())
    with TrajectoryStore.open(run_dir / "store") as store:
        last = store.read(store.ids()[-1:], ["completion"])["completion"][0]
    place = data.rindex(last.encode())
    data[place : place + 4] = b"xxxx"
    chunk.write_bytes(data)
    check = inspect(run_dir).reward_check
    assert check is not None
    assert check.num_different == 1
    assert check.first_different[0].graded_again == 0.0


def test_failed_trajectories(tmp_path: Path):
    """Failed calls count on neither side, and one that would succeed now is told."""
    run_dir = write_run(tmp_path / "run", failed=3)
    found = inspect(run_dir)
    assert (found.num_failed, found.first_failed_id) == (3, 0)
    assert found.finish_reasons == {"length": 45, "failed": 3}
    assert found.reward_check is not None
    assert found.reward_check.agrees
    assert (found.reward_check.num_trajectories, found.reward_check.num_failed_before) == (45, 3)


def test_what_fails_in_a_run_fails_when_it_is_graded_again(tmp_path: Path):
    """A reward that ends the process, or no float32 holds, is none now as it was none then."""
    run_dir = write_run(tmp_path / "run", num_rollouts=1, failed=7)
    for reward in (lambda *_: sys.exit("no"), lambda *_: 1e39):
        check = inspect(run_dir, reward).reward_check
        assert check is not None
        assert (check.num_trajectories, check.num_different, check.num_failed_before) == (1, 1, 0)


def test_tokens_of_replies_are_no_completion(tmp_path: Path):
    """The policy's own tokens are counted; of rows without a mask, all after the prompt."""
    for name, mask, expected in (("a", [[0, 0, 1, 0, 1]], 2), ("b", None, 3)):
        with TrajectoryStore.create(tmp_path / name, trajectory_schema()) as store:
            row: dict[str, Any] = {"input_ids": [[1, 2, 3, 4, 5]], "num_prompt_tokens": [2]}
            store.append(row | ({} if mask is None else {"assistant_mask": [np.array(mask[0], bool)]}))
        with Stored(tmp_path / name) as stored:
            found = inspect_store(stored, run=None, reward=None)
            fields = next(Tail(stored).newest(1))[0].fields
            assert select(stored.store, [f"num_completion_tokens == {expected}"]).tolist() == [0]
        assert (found.num_completion_tokens, fields[4]) == (expected, str(expected))


def test_a_store_that_does_not_say_where_prompts_end(tmp_path: Path):
    """Its prompts' tokens are not 0: they are not known, in the text and in JSON."""
    with TrajectoryStore.create(tmp_path / "store", Schema([Column("input_ids", "int32", ragged=True)])) as store:
        store.append({"input_ids": [[1, 2, 3], [4, 5]]})
    with Stored(tmp_path / "store") as stored:
        found = inspect_store(stored, run=None, reward=None)
    assert found.to_json()["num_prompt_tokens"] is None
    assert "5; where prompts end is not stored" in "\n".join(lines(found))


def test_reward_that_raises_now(run_dir: Path):
    """A call that raises now and did not then is a disagreement with its error."""

    def broken(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
        raise KeyError("gone")

    check = inspect(run_dir, broken).reward_check
    assert check is not None
    assert check.num_different == 48
    assert str(check.first_different[0].error).startswith("KeyError: 'gone' (")
    assert check.first_different[0].graded_again is None


def test_partial_rollouts_are_not_compared(run_dir: Path):
    """A rollout that is not whole in the store says nothing about the curve."""
    config = json.loads((run_dir / "config.json").read_text())
    config["pipeline"]["collect"]["group_size"] = 5
    (run_dir / "config.json").write_text(json.dumps(config))
    check = inspect(run_dir).reward_check
    assert check is not None
    assert (check.num_rollouts, check.num_rollouts_partial) == (0, 6)


def test_damaged_meta(tmp_path: Path):
    """A meta that is not JSON is named with its trajectory."""
    run_dir = write_run(tmp_path / "run", num_rollouts=1)
    chunk = next((run_dir / "store").rglob("meta/c/0"))
    data = chunk.read_bytes()
    chunk.write_bytes(b"?" + data[1:])
    with pytest.raises(DataError, match="the meta of trajectory 0 is not JSON"):
        inspect(run_dir)


def test_histogram():
    """At most eight buckets of one width cover all lengths."""
    assert histogram(np.empty(0, np.int64), np.empty(0, np.int64)) == ()
    buckets = histogram(np.arange(1, 101), np.ones(100, np.int64))
    assert len(buckets) == 8
    assert (buckets[0][:2], buckets[-1][:2]) == ((1, 13), (92, 100))
    assert sum(num for _, _, num in buckets) == 100


def test_a_tally_is_a_counter():
    """Numbers that come back later, in any order and beyond what is held unmerged, are counted and summed once."""
    draws = np.random.default_rng(0).integers(-40_000, 40_000, (30, 10_000))
    tally, plain = Tally(sums=1), dict[int, list[float]]()
    for part in draws:
        tally.add(part, part * 0.5)
    for number in draws.reshape(-1).tolist():
        times, total = plain.get(number, [0, 0.0])
        plain[number] = [times + 1, total + number * 0.5]
    numbers, (times, sums) = tally.found()
    assert numbers.tolist() == sorted(plain)
    assert [list(pair) for pair in zip(times, sums, strict=True)] == [plain[number] for number in sorted(plain)]
    assert Tally().found()[0].tolist() == []
