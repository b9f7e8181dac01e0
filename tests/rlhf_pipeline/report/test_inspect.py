"""Counting what is stored, and grading it again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.cli.stats import lines
from rlhf_pipeline.data.rewards import token_match
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.report.inspect import grade
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.report.tail import Tail
from rlhf_pipeline.user_code.arguments import bind
from trajectory_store import Column, CorruptionError, Schema, TrajectoryStore

from .conftest import write_run


def graded(folder: Path, reward: Any = token_match) -> Answer:
    """Grade a run again with a reward function."""
    with closing(View(folder)) as view:
        check = grade(view, partial(bind, reward))
    assert check is not None
    return check


def test_counts(run_dir: Path):
    """Trajectories, groups, tokens and versions are counted: 6 rollouts, 2 prompts, 4 completions, 5 + 4 tokens."""
    with closing(View(run_dir)) as view:
        found = view.stats()
    assert (found["trajectories"], found["groups"], found["group_sizes"]) == (48, 12, {4: 12})
    assert (found["prompt_tokens"], found["completion_tokens"]) == (240, 192)
    assert found["lengths"] == [[4, 4, 48]]
    assert (found["versions"], found["num_versions"]) == ([0, 10], 6)
    assert found["finish"] == {"length": 48}


def test_edited_curve_is_noticed(run_dir: Path):
    """A point of the curve that was edited by 0.001 is found; the trajectories still agree."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[4]["task_reward"] += 0.001
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check = graded(run_dir)
    assert (check["different"], check["rollouts_different"]) == (0, 1)
    assert (check["first_rollouts_different"][0]["step"], check["first_rollouts_different"][0]["rollout"]) == (5, 2)


def test_edited_completion_is_noticed(run_dir: Path):
    """One completion overwritten on the disk is found by its checksum, before anything is graded."""
    chunk = next((run_dir / "store").rglob("completion/c/0"))
    data = bytearray(chunk.read_bytes())
    with TrajectoryStore.open(run_dir / "store") as store:
        last = store.read(store.ids()[-1:], ["completion"])["completion"][0]
    place = data.rindex(last.encode())
    data[place : place + 4] = b"xxxx"
    chunk.write_bytes(data)
    with pytest.raises(CorruptionError, match="cannot be read"):
        graded(run_dir)


def test_failed_trajectories(tmp_path: Path):
    """Failed calls count on neither side, and one that would succeed now is told."""
    run_dir = write_run(tmp_path / "run", failed=3)
    with closing(View(run_dir)) as view:
        found = view.stats()
    assert (found["no_reward"], found["finish"]) == (3, {"length": 45, "failed": 3})
    check = graded(run_dir)
    assert check["agrees"]
    assert (check["trajectories"], check["failed_before"]) == (45, 3)


def test_what_fails_in_a_run_fails_when_it_is_graded_again(tmp_path: Path):
    """A reward that ends the process, or no float32 holds, is none now as it was none then."""
    run_dir = write_run(tmp_path / "run", num_rollouts=1, failed=7)
    for reward in (lambda *_: sys.exit("no"), lambda *_: 1e39):
        check = graded(run_dir, reward)
        assert (check["trajectories"], check["different"], check["failed_before"]) == (1, 1, 0)


def test_tokens_of_replies_are_no_completion(tmp_path: Path):
    """The policy's own tokens are counted; of rows without a mask, all after the prompt."""
    for name, mask, expected in (("a", [[0, 0, 1, 0, 1]], 2), ("b", None, 3)):
        with TrajectoryStore.create(tmp_path / name, trajectory_schema()) as store:
            row: dict[str, Any] = {"input_ids": [[1, 2, 3, 4, 5]], "num_prompt_tokens": [2]}
            store.append(row | ({} if mask is None else {"assistant_mask": [np.array(mask[0], bool)]}))
        with closing(View(tmp_path / name)) as view:
            found = view.stats()["completion_tokens"]
            shown = list(Tail(view).newest(1))[1].split()[4]
            assert select(view.stored.store, [f"num_completion_tokens == {expected}"]).tolist() == [0]
        assert (found, shown) == (expected, str(expected))


def test_a_store_that_does_not_say_where_prompts_end(tmp_path: Path):
    """Its prompts' tokens are not 0: they are not known, in the text and in JSON."""
    with TrajectoryStore.create(tmp_path / "store", Schema([Column("input_ids", "int32", ragged=True)])) as store:
        store.append({"input_ids": [[1, 2, 3], [4, 5]]})
    with closing(View(tmp_path / "store")) as view:
        found = view.stats()
    assert found["prompt_tokens"] is None
    assert "5; prompt lengths are not stored" in "\n".join(lines(found))


def test_reward_that_raises_now(run_dir: Path):
    """A call that raises now and did not then is a disagreement with its error."""

    def broken(prompt: str, completion: str, answer: str | None, meta: Mapping[str, object]) -> float:
        raise KeyError("gone")

    check = graded(run_dir, broken)
    assert check["different"] == 48
    assert str(check["first_different"][0]["error"]).startswith("KeyError: 'gone' (")
    assert check["first_different"][0]["now"] is None


def test_partial_rollouts_are_not_compared(run_dir: Path):
    """A rollout that is not whole in the store says nothing about the curve."""
    config = json.loads((run_dir / "config.json").read_text())
    config["pipeline"]["collect"]["group_size"] = 5
    (run_dir / "config.json").write_text(json.dumps(config))
    check = graded(run_dir)
    assert (check["rollouts"], check["rollouts_partial"]) == (0, 6)


def test_damaged_meta(tmp_path: Path):
    """A meta whose bytes changed, and one that is not JSON, are reported with their trajectories."""
    run_dir = write_run(tmp_path / "run", num_rollouts=1)
    chunk = next((run_dir / "store").rglob("meta/c/0"))
    data = chunk.read_bytes()
    chunk.write_bytes(b"?" + data[1:])
    with pytest.raises(CorruptionError, match=r"trajectories 0, 1, .* cannot be read"):
        graded(run_dir)
    with TrajectoryStore.create(tmp_path / "store", trajectory_schema()) as store:
        store.append({"input_ids": [[1]], "prompt": ["a"], "completion": ["b"], "task_reward": [1.0], "meta": ["?"]})
    with pytest.raises(DataError, match="column `meta`: the value of trajectory 0 is not JSON"):
        graded(tmp_path / "store")


def test_histogram(tmp_path: Path):
    """At most eight buckets of one width cover all lengths."""
    schema = Schema([Column("input_ids", "int32", ragged=True)])
    with TrajectoryStore.create(tmp_path / "store", schema) as store, closing(View(tmp_path / "store")) as view:
        assert view.stats()["lengths"] == []
        store.append({"input_ids": [[0] * length for length in range(1, 101)]})
        view.refresh()
        buckets = view.stats()["lengths"]
    assert len(buckets) == 8
    assert (buckets[0][:2], buckets[-1][:2]) == ([1, 13], [92, 100])
    assert sum(num for _, _, num in buckets) == 100
