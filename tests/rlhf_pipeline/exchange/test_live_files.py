"""Following a writer that rotates, compresses, truncates and rewrites its files: each episode once, newest version."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.exchange import follow_folder, import_files
from rlhf_pipeline.report.tokens import Characters
from trajectory_store import TrajectoryStore

from .live_writers import EPISODE, STREAMS, TOOLS, TRIALS, Sample, Steps, Stream, Trials, atif_tokens, packed, writer_of


def current(store: Path, column: str, *, graded: bool) -> Counter[str]:
    """Return what identifies the rows that a learner would use, and their rewards."""
    with TrajectoryStore.open(store, mode="r") as opened:
        rows = opened.read(opened.ids(), [column, "task_reward", "superseded"])
    values: list[str] = []
    for i, old in enumerate(rows["superseded"]):
        name = {"completion": rows[column][i], "input_ids": "", "task_reward": ""}[column]
        name = str(rows[column][i].tolist()) if column == "input_ids" else name
        values += [] if old else [f"{name} {float(rows['task_reward'][i]) if graded else ''}"]
    return Counter(values)


NAMES = (*STREAMS, *TOOLS, *TRIALS)
SWEEPS = [pytest.param(name, rounds, seed, marks=marks)
          for rounds, seeds, marks in ((12, (1,), ()), (100, (2, 3), (pytest.mark.nightly, pytest.mark.timeout(1800))))
          for name in NAMES for seed in seeds]  # fmt: skip


@pytest.mark.parametrize(("name", "rounds", "seed"), SWEEPS)
def test_each_episode_once_in_its_newest_version(tmp_path: Path, name: str, rounds: int, seed: int):
    """After any history the current rows of the store are those of the files, and an import of the files adds none."""
    writer, left, vanished, unreadable = writer_of(name, tmp_path / "out", seed), [rounds], list[Path](), list[str]()

    def wait(seconds: float) -> None:
        for _ in range(writer.random.choice([1, 1, 3])):
            writer.change()
        left[0] -= 1
        if left[0] <= 0:
            writer.finish()

    options: dict[str, Any] = {"tokenizer": Characters(), "one_turn": True}
    follow_folder(
        tmp_path / "out",
        tmp_path / "store",
        stop=lambda: left[0] <= 0,
        wait=wait,
        on_vanished=vanished.append,
        on_unreadable=unreadable.append,
        **options,
    )
    assert current(tmp_path / "store", writer.tool.column, graded=writer.tool.graded) == writer.expected()
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    group = "none" if name in (*STREAMS, "token-exports") else None  # a chunk may hold one member of each group
    assert import_files([tmp_path / "elsewhere"], tmp_path / "store", group=group, **options).num_imported == 0
    written = {path.name.split(".")[0] for path in (tmp_path / "elsewhere").rglob("*.*")}
    assert {path.name.split(".")[0] for path in vanished} <= written
    assert not unreadable


def test_advantages_that_come_later(tmp_path: Path):
    """prime-rl writes advantages, and what it trained on, as annotations: the stored row gets the last advantage."""
    episode = copy.deepcopy(EPISODE)
    for node in episode["traces"][0]["nodes"]:
        node.pop("advantages", None)
    for name, row in (
        ("traces/stream/00000.jsonl", episode),
        ("traces/index.jsonl", {"line": 1, "id": "e1", "trace_ids": ["t1"], "chunk": 0, "offset": 0}),
        ("traces/live/t2.jsonl", {"trace": "t2", "open": {}}),
    ):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(json.dumps(row) + "\n")
    import_files([tmp_path / "run"], tmp_path / "store")

    def advantages() -> list[float]:
        with TrajectoryStore.open(tmp_path / "store", mode="r") as store:
            return store.read(store.ids(), ["advantage"])["advantage"].tolist()

    assert str(advantages()) == "[nan]"
    stream = [None, None, None, None, -0.5, None, -0.5, -0.5]
    update = {"version": 1, "trace_id": "t1", "info": {}, "branches": [{"index": 0, "advantages": stream}]}
    notes = tmp_path / "run/traces/annotations/trainer"
    notes.mkdir(parents=True)
    (notes / "00000.jsonl").write_text(json.dumps(update) + "\n")
    follow_folder(tmp_path / "run", tmp_path / "store", stop=lambda: True)
    assert advantages() == [-0.5]
    update["info"] = {"effective": True, "ship": {"step": 3, "time": 1.5}, "advantage": 0.25}
    update["branches"][0]["advantages"] = [None if value is None else 0.25 for value in stream]
    (notes / "00001.jsonl").write_text(json.dumps(update) + "\n")
    import_files([tmp_path / "run"], tmp_path / "store")
    assert advantages() == [0.25]
    later = {"version": 1, "trace_id": "t1", "info": {}, "branches": [{"index": 0, "entropies": stream}]}
    (notes / "00002.jsonl").write_text(json.dumps(later) + "\n")
    import_files([tmp_path / "run"], tmp_path / "store")
    with TrajectoryStore.open(tmp_path / "store", mode="r") as store:
        assert store.read(store.ids(), ["effective"])["effective"].tolist() == [True]
    assert advantages() == [0.25]


def test_a_file_that_disappears_is_reported(tmp_path: Path):
    """A file that is gone, with no compressed form in its place, may have had rows that were never read."""
    folder, vanished = tmp_path / "out", list[Path]()
    writer = Stream(STREAMS["prime-rl"], folder, 0)
    writer.append()
    writer.other()
    file = writer.finished()[0]
    rounds = iter([lambda: file.unlink(), lambda: None])
    follow_folder(
        folder,
        tmp_path / "store",
        stop=lambda: False,
        until_quiet_s=0.2,
        wait=lambda seconds: next(rounds, lambda: None)(),
        on_vanished=vanished.append,
    )
    assert vanished == [file]


def test_a_file_that_stays_incomplete_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A table that the trainer never completed is reported at the end, and one that it completed later is not."""
    writer, unreadable = Steps(TOOLS["trl"], tmp_path / "out", 0), list[str]()
    rounds = iter([lambda: writer.write(1, cut=True), lambda: writer.write(1, cut=False), writer.append])
    monkeypatch.chdir(tmp_path)
    writer.append()

    def wait(seconds: float) -> None:
        next(rounds, lambda: writer.write(2, cut=True))()

    left = iter([False] * 5)
    follow_folder(
        "out",
        "store",
        stop=lambda: next(left, True),
        wait=wait,
        on_unreadable=unreadable.append,
        tokenizer=Characters(),
        one_turn=True,
    )
    assert [("00001" in reason, "00002" in reason) for reason in unreadable] == [(False, True)]


def test_an_early_version_of_an_episode_replaces_nothing(tmp_path: Path):
    """Of an episode's documents the longest counts, and of equal ones that with a reward, whenever each is imported."""
    writer = Trials(TRIALS["atif"], tmp_path / "job", 0)
    for _ in range(2):
        writer.append()
    writer.extend(0)
    writer.write(0, cut=False)
    early = writer.path(0).read_text()
    writer.extend(0)
    writer.end(0, cut=False)
    expected = Counter({f"{atif_tokens(writer.sample(0), 3)} 0.0": 1})
    for folder, document in (("job/t0", None), ("early", early), ("alone", writer.path(0).read_text())):
        if document is not None:
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "trajectory.json").write_text(document)
        import_files([tmp_path / folder], tmp_path / "store")
        assert current(tmp_path / "store", "input_ids", graded=True) == expected
    result = tmp_path / "job/t0/result.json"
    result.write_text(result.read_text().replace('"reward": 0.0', '"reward": 0.5'))
    import_files([tmp_path / "job/t0"], tmp_path / "store")
    assert current(tmp_path / "store", "input_ids", graded=True) == Counter(
        {f"{atif_tokens(writer.sample(0), 3)} 0.5": 1}
    )


def test_a_torn_table_is_read_once_it_is_complete(tmp_path: Path):
    """Wherever a Parquet file or its compressed form ends, follow continues, and reads the complete one."""
    tool, folder = TOOLS["trl"], tmp_path / "completions"
    samples = [Sample(1, number, reward, reward - 0.5) for number, reward in ((1, 1.0), (2, 0.0))]
    data = tool.encode([tool.row(sample) for sample in samples])
    folder.mkdir()
    for suffix, whole in (("", data), (".gz", packed(data, ".gz")), (".zst", packed(data, ".zst"))):
        file = folder / f"completions_00001.parquet{suffix}"
        torn = [whole[: len(whole) * part // 8] for part in range(8)]
        torn += [whole[: len(whole) // 2].ljust(len(whole), b"\0"), whole[: len(whole) // 2] + whole[-8:], whole]
        versions, unreadable = iter(torn), list[str]()
        file.write_bytes(next(versions))
        left = iter([False] * (len(torn) - 1))
        follow_folder(
            folder,
            tmp_path / f"store{suffix}",
            stop=lambda left=left: next(left, True),
            wait=lambda seconds, file=file, versions=versions: file.write_bytes(next(versions)),
            on_unreadable=unreadable.append,
            tokenizer=Characters(),
            one_turn=True,
        )
        assert current(tmp_path / f"store{suffix}", "completion", graded=True) == Counter({"n1 1.0": 1, "n2 0.0": 1})
        assert not unreadable
        file.unlink()


@pytest.mark.parametrize("name", ["trl", "nemo-rl", "open-instruct"])
def test_rewritten_advantages_are_the_current_ones(tmp_path: Path, name: str):
    """A file that is written again with other advantages supersedes its rows, also where nothing else changed."""
    tool = {**STREAMS, **TOOLS}[name]
    file = tmp_path / tool.path.format(1)
    file.parent.mkdir(parents=True)
    options: dict[str, Any] = {"tokenizer": Characters(), "one_turn": True, "group": "none"}
    for scale in (1.0, 0.5):
        rows = [
            tool.row(Sample(1, number, reward, scale * (2 * reward - 1))) for number, reward in ((1, 1.0), (2, 0.0))
        ]
        file.write_bytes(tool.encode(rows))
        report = import_files([tmp_path], tmp_path / "store", **options)
        with TrajectoryStore.open(tmp_path / "store", mode="r") as store:
            columns = store.read(store.ids(), ["advantage", "superseded", "task_reward"])
        is_current = [not old for old in columns["superseded"]]
        assert sorted(columns["advantage"][is_current].tolist()) == [-scale, scale]
        assert (sum(is_current), report.num_imported) == (2, 2)


def test_a_row_that_returns_to_an_earlier_version_stays_current(tmp_path: Path):
    """A step is graded, graded again, and written with the first rewards and one more row: these are the newest."""
    file, options = tmp_path / "rollouts/1.jsonl", {"tokenizer": Characters(), "one_turn": True, "group": "none"}
    file.parent.mkdir()
    tool = TOOLS["verl"]
    for rewards in ((1.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0)):
        rows = [tool.row(Sample(1, number, reward, 0.0)) for number, reward in enumerate(rewards)]
        file.write_bytes(tool.encode(rows))
        import_files([file], tmp_path / "store", **options)
    expected = Counter({"n0 1.0": 1, "n1 0.0": 1, "n2 1.0": 1})
    for step in (2, 3):
        assert current(tmp_path / "store", "completion", graded=True) == expected
        (file.parent / f"{step}.jsonl").write_bytes(tool.encode([tool.row(Sample(step, step + 1, 0.0, 0.0))]))
        import_files([file.parent], tmp_path / "store", **options)
        expected[f"n{step + 1} 0.0"] = 1
