"""What a follower of a store sees: each trajectory once, in order, whatever happens to the store meanwhile."""

from __future__ import annotations

from pathlib import Path

from rlhf_pipeline.buffer.filters import select
from rlhf_pipeline.report.stored import Ids, Stored
from rlhf_pipeline.report.tail import Arrival, Table, Tail, interleaved, step_line
from trajectory_store import Column, Schema, TrajectoryStore

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


def texts(batches: object) -> list[str]:
    """Return the completions of all batches."""
    return [item.completion for batch in batches for item in batch]  # type: ignore[attr-defined]


def test_newest_and_fresh(tmp_path: Path):
    """The newest are shown oldest first; what another handle commits later is shown once, in order."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store:
        add(store, 0, 5)
        with Stored(tmp_path / "s") as stored:
            tail = Tail(stored)
            assert texts(tail.newest(3)) == ["text 2", "text 3", "text 4"]
            assert texts(tail.newest(99)) == [f"text {row}" for row in range(5)]
            assert texts(tail.newest(0)) == texts(tail.fresh()) == []
            add(store, 5, 2)
            add(store, 7, 1)
            assert texts(tail.fresh()) == ["text 5", "text 6", "text 7"]
            assert texts(tail.fresh()) == []


def test_more_than_one_batch(tmp_path: Path):
    """A store that has grown by thousands at once is read in batches, and places count on."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store, Stored(tmp_path / "s") as stored:
        tail = Tail(stored)
        add(store, 0, 3000)
        batches = list(tail.fresh())
        assert len(batches) > 1
        assert [item.place for batch in batches for item in batch] == list(range(1, 3001))


def test_two_writers_and_compaction(tmp_path: Path):
    """Rows of two writers interleave; compaction moves rows and shows none again."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as one, TrajectoryStore.open(tmp_path / "s", "a") as two:
        add(one, 0, 2)
        with Stored(tmp_path / "s") as stored:
            tail = Tail(stored)
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
    """Rows that were evicted before they could be shown are passed over; places go on counting."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, max_trajectories=8, segment_rows=4)
    with store, Stored(tmp_path / "s") as stored:
        tail = Tail(stored)
        add(store, 0, 4)
        assert texts(tail.fresh()) == [f"text {row}" for row in range(4)]
        for first in range(4, 40, 4):
            add(store, first, 4)
        shown = [item for batch in tail.fresh() for item in batch]
        assert [item.completion for item in shown] == [f"text {row}" for row in range(32, 40)]
        assert [item.place for item in shown] == list(range(33, 41))


def test_eviction_while_it_is_read(tmp_path: Path):
    """A batch whose rows leave between its listing and its reading comes without them, and nothing is raised."""
    store = TrajectoryStore.create(tmp_path / "s", SCHEMA, max_trajectories=8, segment_rows=4)
    add(store, 0, 8)
    with store, Stored(tmp_path / "s") as stored:

        def late(ids: Ids) -> Ids:
            for first in range(8, 20, 4):
                add(store, first, 4)
            return ids

        assert texts(Tail(stored, late).newest(8)) == []
        assert len(texts(Tail(stored).newest(8))) == 8


def test_choice(tmp_path: Path):
    """The newest that meet a condition are found however far back; later ones are judged as they come."""
    with TrajectoryStore.create(tmp_path / "s", SCHEMA) as store:
        add(store, 0, 1, reward=1.0)
        add(store, 1, 20_000, reward=0.0)
        with Stored(tmp_path / "s") as stored:
            tail = Tail(stored, lambda ids: select(stored.store, ["reward>0.9"], ids))
            assert texts(tail.newest(10)) == ["text 0"]
            add(store, 20_001, 2, reward=0.0)
            add(store, 20_003, 1, reward=1.0)
            assert texts(tail.fresh()) == ["text 20003"]


def test_without_text(tmp_path: Path):
    """Where no text is stored the completion's token ids are shown; what is not known is a dash."""
    with TrajectoryStore.create(tmp_path / "s", Schema(SCHEMA.columns[:2])) as store:
        store.append({"input_ids": [[1, 2, 3], list(range(50))], "num_prompt_tokens": [1, 2]})
    with Stored(tmp_path / "s") as stored:
        short, long = next(Tail(stored).newest(2))
    assert (short.completion, short.fields) == ("[2 3]", ("0", "-", "-", "-", "2", "-"))
    with TrajectoryStore.create(tmp_path / "t", Schema([Column("completion", "str")])) as store:
        store.append({"completion": ["words alone"]})
    with Stored(tmp_path / "t") as stored:
        [words] = next(Tail(stored).newest(2))
    assert (words.completion, words.fields) == ("words alone", ("0", "-", "-", "-", "-", "-"))
    assert long.completion.startswith("[2 3 4 ")
    assert long.completion.endswith(" 33 ...]")


def test_table():
    """Columns line up, get wider and never narrower; a text is cut to the terminal and its controls spelled out."""

    def item(row: str, text: str) -> Arrival:
        return Arrival(place=1, fields=(row, "0", "1", "0.50", "4", "stop"), completion=text)

    table = Table(60)
    first = table.lines([item("1", "a\x1b[31m\nbcd")], heading=True)
    assert first == [
        "    id  version   group   reward  tokens  finish  completion",
        "     1        0       1     0.50       4    stop  a\\x1b[31m...",
    ]
    assert table.lines([item("4294967296", "x" * 99)])[0].endswith("  0       1     0.50       4    stop  xxxxxxxxx...")
    assert table.lines([item("2", "y")])[0].startswith("         2  ")


def test_interleaved():
    """A step stands after the trajectories that were stored when it was taken."""
    arrivals = [Arrival(place=place, fields=(), completion="") for place in (3, 4, 5)]
    steps = [{"step": 1, "watermark": 0}, {"step": 2, "watermark": 4, "loss": 0.25}, {"step": 3}]
    lines = interleaved(arrivals, ["a", "b", "c"], steps)
    assert lines == ["step 1", "a", "b", "step 2: loss 0.2500", "c", "step 3"]
    assert step_line({"step": 2, "task_reward": None}) == "step 2"
