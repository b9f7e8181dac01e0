"""Following a writer that rotates, compresses, truncates and rewrites its files: each episode once, newest version."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.exchange import follow_folder, import_files
from rlhf_pipeline.report.tokens import Characters
from trajectory_store import TrajectoryStore

DATA = Path(__file__).parent / "data"
EPISODE = json.loads((DATA / "prime_rl/rollouts/step_9/train/all/traces.jsonl").read_text().splitlines()[0])


def packed(data: bytes, suffix: str) -> bytes:
    """Return data compressed as its file's name tells."""
    return gzip.compress(data) if suffix == ".gz" else pytest.importorskip("zstandard").compress(data)


class Writer:
    """Changes the files of a folder at random, as a running tool and its surroundings do; knows what is current."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.random, self.num = folder, random.Random(seed), 0

    def change(self) -> None:
        """Take one random action."""
        actions: list[Callable[[], None]] = [self.append, self.append, self.compress, self.rename, self.other]
        self.random.choice(actions)()

    def finished(self) -> list[Path]:
        """Return the uncompressed files that the tool has ended."""
        return sorted(self.folder.rglob("*.jsonl"))[:-1]

    def compress(self) -> None:
        """Replace a finished file by its compressed form, which appears complete."""
        for file in self.finished()[:1]:
            suffix = self.random.choice([".gz", ".zst"])
            part = file.with_name(f"{file.name}{suffix}.tmp")
            part.write_bytes(packed(file.read_bytes(), suffix))
            part.rename(file.with_name(f"{file.name}{suffix}"))
            file.unlink()

    def append(self) -> None: ...
    def rename(self) -> None: ...
    def other(self) -> None: ...
    def expected(self) -> Counter[str]: ...


class Stream(Writer):
    """prime-rl's stream: appended lines in numbered chunks; a torn line; chunks that move to another folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.chunk, self.rest = 0, b""

    def finished(self) -> list[Path]:
        return [file for file in sorted(self.folder.rglob("*.jsonl")) if file.name != f"{self.chunk:05d}.jsonl"]

    def append(self) -> None:
        episode = copy.deepcopy(EPISODE)
        episode["id"], episode["group"] = f"e{self.num}", {"id": f"g{self.num // 3}"}
        episode["traces"][0]["id"] = f"t{self.num}"
        episode["traces"][0]["rewards"] = {"right": {"score": float(self.num % 5), "weight": 1.0}}
        self.num += 1
        line = self.rest + json.dumps(episode).encode() + b"\n"
        cut = self.random.choice([len(line), len(line), len(line) - 30])
        self.rest = line[cut:]
        with (self.folder / f"{self.chunk:05d}.jsonl").open("ab") as file:
            file.write(line[:cut])

    def rename(self) -> None:
        for file in self.finished()[:1]:
            (self.folder / "old").mkdir(exist_ok=True)
            file.rename(self.folder / "old" / f"moved-{file.name}")

    def other(self) -> None:
        if self.rest:
            with (self.folder / f"{self.chunk:05d}.jsonl").open("ab") as file:
                file.write(self.rest)
            self.rest = b""
        self.chunk += 1

    def finish(self) -> None:
        self.other()

    def expected(self) -> Counter[str]:
        return Counter(str(number % 5) for number in range(self.num))


class Steps(Writer):
    """verl's files, one per step: a restart writes a step again, at first in part, and truncates files."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.steps: dict[int, list[dict[str, Any]]] = {}

    def rows(self, step: int, num: int) -> list[dict[str, Any]]:
        self.num += 1
        about = {"gts": "2", "step": step}
        return [
            {"input": f"q{step}?", "output": f"{self.num} {i}", "score": float(i % 2), "request_id": f"{self.num}-{i}"}
            | about
            for i in range(num)
        ]

    def write(self, step: int, rows: list[dict[str, Any]], *, cut: bool) -> None:
        for file in self.folder.rglob(f"{step}.jsonl*"):
            file.unlink()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self.folder / f"{step}.jsonl").write_text(text[: len(text) // 2] if cut else text)

    def append(self) -> None:
        step = len(self.steps) + 1
        self.steps[step] = self.rows(step, self.random.choice([2, 4, 4]))
        self.write(step, self.steps[step], cut=False)

    def rename(self) -> None:
        for file in self.finished()[:1]:
            (self.folder / "archive").mkdir(exist_ok=True)
            file.rename(self.folder / "archive" / file.name)

    def other(self) -> None:
        if self.steps:
            step = self.random.choice(sorted(self.steps)[-3:])
            if self.random.random() < 0.5:  # a restart
                self.steps[step] = self.rows(step, self.random.choice([2, 4, 5]))
            self.write(step, self.steps[step], cut=self.random.random() < 0.5)

    def finish(self) -> None:
        for step, rows in self.steps.items():
            self.write(step, rows, cut=False)

    def expected(self) -> Counter[str]:
        return Counter(row["output"] for rows in self.steps.values() for row in rows)


def current(store: Path, column: str) -> Counter[str]:
    """Return the values of the rows that a learner would use."""
    with TrajectoryStore.open(store, mode="r") as opened:
        rows = opened.read(opened.ids(), [column, "superseded", "trajectory_id"])
    pairs = zip(rows[column], rows["superseded"], strict=True)
    values = [
        f"{value:g}" if isinstance(value, float) or hasattr(value, "dtype") else value
        for value, old in pairs
        if not old
    ]
    return Counter(values)


@pytest.mark.parametrize(
    ("kind", "column", "rounds"),
    [
        (Stream, "task_reward", 25),
        (Steps, "completion", 25),
        pytest.param(Stream, "task_reward", 100, marks=pytest.mark.slow),
        pytest.param(Steps, "completion", 100, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_each_episode_once_in_its_newest_version(tmp_path: Path, kind: Any, column: str, rounds: int, seed: int):
    """After any history the current rows of the store are those of the files, and an import of the files adds none."""
    writer, left, vanished = kind(tmp_path / "out", seed), [rounds], list[Path]()

    def wait(seconds: float) -> None:
        for _ in range(writer.random.choice([1, 1, 3])):
            writer.change()
        left[0] -= 1
        if left[0] <= 0:
            writer.finish()

    options: dict[str, Any] = {"tokenizer": Characters(), "one_turn": True} if kind is Steps else {}
    follow_folder(
        tmp_path / "out",
        tmp_path / "store",
        stop=lambda: left[0] <= 0,
        wait=wait,
        on_vanished=vanished.append,
        **options,
    )
    if kind is Steps:
        writer.finish()
        follow_folder(tmp_path / "out", tmp_path / "store", stop=lambda: True, **options)
    assert current(tmp_path / "store", column) == writer.expected()
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    assert import_files([tmp_path / "elsewhere"], tmp_path / "store", **options).num_imported == 0
    moved = {path.name.split(".jsonl")[0].replace("moved-", "") for path in (tmp_path / "elsewhere").rglob("*.jsonl*")}
    assert {path.name.split(".jsonl")[0].replace("moved-", "") for path in vanished} <= moved


def test_advantages_that_come_later(tmp_path: Path):
    """prime-rl writes advantages as annotations beside its stream: the stored trajectory gets the last one."""
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
    update["branches"][0]["advantages"] = [None if value is None else 0.25 for value in stream]
    (notes / "00001.jsonl").write_text(json.dumps(update) + "\n")
    import_files([tmp_path / "run"], tmp_path / "store")
    assert advantages() == [0.25]


def test_a_file_that_disappears_is_reported(tmp_path: Path):
    """A file that is gone, with no compressed form in its place, may have had rows that were never read."""
    folder, vanished = tmp_path / "out", list[Path]()
    writer = Stream(folder, 0)
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
