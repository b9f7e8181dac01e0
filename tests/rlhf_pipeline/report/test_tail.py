"""What a follower of a store sees: each trajectory once, in order, whatever happens to the store meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.report.stored import Ids
from rlhf_pipeline.report.tail import Tail, step_line
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import Column, Schema, TrajectoryStore

from .conftest import write_run

SCHEMA = Schema(
    [
        Column("input_ids", "int32", ragged=True),
        Column("num_prompt_tokens", "int32"),
        Column("task_reward", "float32", fill=float("nan")),
        Column("group_id", "int64", fill=-1),
        Column("finish_reason", "str", fill=""),
        Column("completion", "str", fill=""),
    ]
)


def add(store: TrajectoryStore, first: int, num: int, reward: float = 0.5) -> list[int]:
    """Commit `num` trajectories whose completions are their numbers from `first` on."""
    rows = range(first, first + num)
    return store.append(
        {
            "input_ids": [[7, row, 9] for row in rows],
            "num_prompt_tokens": [1] * num,
            "task_reward": [reward] * num,
            "completion": [f"text {row}" for row in rows],
        }
    ).tolist()


def texts(lines: Iterable[str]) -> list[str]:
    """Return the completions of lines, without the heading."""
    return [line[-1 - line[::-1].index("  ") :].strip() for line in lines if not line.endswith("completion")]


def test_newest_and_fresh(tmp_path: Path):
    """The newest are shown oldest first; what another handle commits later is shown once, in order."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store:
        add(store, 0, 5)
        with closing(View(tmp_path / "s")) as view:
            tail = Tail(view)
            assert texts(tail.newest(3)) == ["text 2", "text 3", "text 4"]
            assert texts(tail.newest(99)) == [f"text {row}" for row in range(5)]
            assert texts(tail.newest(0)) == texts(tail.fresh()) == []
            add(store, 5, 2)
            add(store, 7, 1)
            assert texts(tail.fresh()) == ["text 5", "text 6", "text 7"]
            assert texts(tail.fresh()) == []
            add(store, 8, 3000)  # more than one batch
            assert texts(tail.fresh()) == [f"text {row}" for row in range(8, 3008)]


def test_two_writers_and_compaction(tmp_path: Path):
    """Rows of two writers interleave; compaction moves rows and shows none again."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as one, TrajectoryStore.open(tmp_path / "s", "a") as two:
        add(one, 0, 2)
        with closing(View(tmp_path / "s")) as view:
            tail = Tail(view)
            add(two, 2, 2)
            add(one, 4, 2)
            assert texts(tail.fresh()) == [f"text {row}" for row in range(2, 6)]
            one.close()
            assert two.compact().rows == 6
            assert texts(tail.fresh()) == []
            add(two, 6, 1)
            assert texts(tail.fresh()) == ["text 6"]
            assert texts(tail.newest(3)) == ["text 4", "text 5", "text 6"]


def test_eviction(tmp_path: Path):
    """Rows that were evicted before they could be shown are passed over."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, max_trajectories=8, segment_rows=4)
    with store, closing(View(tmp_path / "s")) as view:
        tail = Tail(view)
        add(store, 0, 4)
        assert texts(tail.fresh()) == [f"text {row}" for row in range(4)]
        for first in range(4, 40, 4):
            add(store, first, 4)
        assert texts(tail.fresh()) == [f"text {row}" for row in range(32, 40)]


def test_eviction_while_it_is_read(tmp_path: Path):
    """A batch whose rows leave between its listing and its reading comes without them, and nothing is raised."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, max_trajectories=8, segment_rows=4)
    add(store, 0, 8)

    class Late(View):
        """Reads after eight further rows, which evict the others."""

        def rows(self, ids: Ids) -> list[Answer]:
            """Return rows, late."""
            for first in range(8, 20, 4):
                add(store, first, 4)
            return super().rows(ids)

    with store:
        with closing(Late(tmp_path / "s")) as view:
            assert texts(Tail(view).newest(8)) == []
        with closing(View(tmp_path / "s")) as view:
            assert len(texts(Tail(view).newest(8))) == 8


def test_choice(tmp_path: Path):
    """The newest that meet a condition are found however far back; later ones are judged as they come."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store:
        add(store, 0, 1, reward=1.0)
        add(store, 1, 20_000, reward=0.0)
        with closing(View(tmp_path / "s")) as view:
            tail = Tail(view, ["reward>0.9"])
            assert texts(tail.newest(10)) == ["text 0"]
            add(store, 20_001, 2, reward=0.0)
            add(store, 20_003, 1, reward=1.0)
            assert texts(tail.fresh()) == ["text 20003"]


def test_without_text(tmp_path: Path):
    """Where no text is stored the completion's token ids are shown; what is not known is a dash."""
    with TrajectoryStore.create(tmp_path / "s", Schema(SCHEMA.columns[:2])) as store:
        store.append({"input_ids": [[1, 2, 3], list(range(50))], "num_prompt_tokens": [1, 2]})
    with closing(View(tmp_path / "s")) as view:
        _, short, long = Tail(view, width=300).newest(2)
    assert short.split() == ["0", "-", "-", "-", "2", "-", "[2][3]"]
    assert long.split()[-1] == "".join(f"[{token}]" for token in range(2, 34))
    with TrajectoryStore.create(tmp_path / "t", Schema([Column("completion", "str")])) as store:
        store.append({"completion": ["words alone"]})
    with closing(View(tmp_path / "t")) as view:
        _, words = Tail(view).newest(2)
    assert words.split() == ["0", "-", "-", "-", "0", "-", "words", "alone"]


def test_table(tmp_path: Path):
    """Columns line up, get wider and never narrower; a text is cut to the terminal and its controls spelled out."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store, closing(View(tmp_path / "s")) as view:
        tail = Tail(view, width=60)

        def one(group: int, text: str) -> None:
            row = {"num_prompt_tokens": [1], "task_reward": [0.5], "finish_reason": ["stop"]}
            store.append({**row, "input_ids": [[1, 2]], "group_id": [group], "completion": [text]})

        one(1, "a\x1b[31m\nbcd")
        view.refresh()
        assert list(tail.newest(1)) == [
            "    id  version   group   reward  tokens  finish  completion",
            "     0        -       1     0.50       1    stop  a\\x1b[31m...",
        ]
        list(tail.fresh())
        one(4294967296, "x" * 99)
        one(2, "y")
        assert list(tail.fresh()) == [
            "     1        -  4294967296     0.50       1    stop  xxxxxxxxx...",
            "     2        -           2     0.50       1    stop  y",
        ]


def test_a_step_is_after_what_was_stored_when_it_was_taken(tmp_path: Path):
    """New trajectories and new steps are in one order; one that does not say what was stored goes last."""
    run = write_run(tmp_path / "run", num_rollouts=1)
    with TrajectoryStore.open(run / "store", "a") as store, closing(View(run)) as view:
        tail = Tail(view)
        assert list(tail.newest(1))[-1].startswith("step 2: ")
        rows: dict[str, Any] = store.read(store.ids()[:3])
        rows.pop("ids", None)
        store.append(rows | {"completion": ["a", "b", "c"]})
        for step in ({"step": 3, "watermark": 8}, {"step": 4, "watermark": 10, "loss": 0.25}, {"step": 5}):
            StepRows(run / "metrics.jsonl").append(step)
        found = [line.rpartition("  ")[2] for line in tail.fresh()]
    assert found == ["step 3", "a", "b", "step 4: loss 0.2500", "c", "step 5"]
    assert step_line({"step": 2, "task_reward": None}) == "step 2"
