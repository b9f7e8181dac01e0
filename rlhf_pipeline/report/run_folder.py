"""Reading a run folder: its configuration, its metrics, its ledger and where its store is."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DataError, MissingPathError, did_you_mean
from rlhf_pipeline.jsonl import read_rows

FORMAT = 1
"""The format of `config.json` that this version reads and writes."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What `config.json` says: enough to build the same pipeline again."""

    definition: str
    """A built-in name, or `/abs/file.py:function`."""
    overrides: tuple[tuple[str, str], ...]
    seed: int
    device: str
    pipeline: Mapping[str, Any]
    """The definition as plain data, for reading by people; the definition itself is what a resume loads."""
    versions: Mapping[str, str]


class RunFolder:
    """A run on disk. Files are read when first asked for.

    Args:
        path: the folder that `rlhf-pipeline run` wrote.

    Raises:
        MissingPathError: there is no run at `path`.
        DataError: `config.json` is damaged or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = _read_config(self.path)

    @property
    def store_path(self) -> Path:
        """The folder of the trajectory store."""
        return self.path / "store"

    @functools.cached_property
    def metrics(self) -> list[Row]:
        """One row per optimizer step, in order. Where a resumed run did a step again, the later row counts."""
        return list({row["step"]: row for row in self.metric_lines}.values())

    @functools.cached_property
    def metric_lines(self) -> list[Row]:
        """The lines of `metrics.jsonl` as they are; a torn last line is left out."""
        return _rows_with_step(self.path / "metrics.jsonl")

    @functools.cached_property
    def ledger(self) -> list[Row]:
        """The lines of `ledger.jsonl`: which trajectories entered which optimizer step."""
        return _rows_with_step(self.path / "ledger.jsonl")

    def reward_points(self) -> list[tuple[float, float]]:
        """Return `(step, mean task reward)` of each rollout that has one."""
        return self.points("task_reward")

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return `(step, value)` of one metric where it is not null."""
        return [(row["step"], float(row[name])) for row in self.metrics if row.get(name) is not None]


def is_run(path: Path) -> bool:
    """Return True if a run was started in this folder."""
    return (path / "config.json").is_file()


def is_store(path: Path) -> bool:
    """Return True if this folder is a trajectory store."""
    return (path / "zarr.json").is_file()


def not_found(path: Path, wanted: str = "run") -> MissingPathError:
    """Return an error that names the runs which are there."""
    runs = sorted({*_runs_in(path.parent), *_runs_in(Path("runs"))})
    if is_store(path.parent / "store"):
        runs.append(path.parent / "store")
    if not runs:
        hint = " Make one: rlhf-pipeline run copy_digits"
    else:
        near = did_you_mean(str(path), map(str, runs))
        hint = near.replace("Known:", "Runs here:") if len(runs) <= 8 else near.split(" Known:")[0]
    what = "is not one" if path.exists() else "does not exist"
    return MissingPathError(f"there is no {wanted} at {path}: the folder {what}.{hint}")


def _runs_in(folder: Path) -> list[Path]:
    return [config.parent for config in folder.glob("*/config.json") if (config.parent / "metrics.jsonl").is_file()]


def _read_config(folder: Path) -> RunConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise not_found(folder)
    try:
        data: Any = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not JSON ({error}). Restore it, or start a new run with another --out.") from error
    if not isinstance(data, dict) or "definition" not in data:
        raise DataError(f"{file} is not the configuration of a run: it names no 'definition'.")
    if data.get("format") != FORMAT:
        raise DataError(
            f"{file} has format {data.get('format')!r}; this version of rlhf-pipeline reads format {FORMAT}. "
            "Read it with the version that wrote it (its 'versions' say which), or upgrade this one."
        )
    return RunConfig(
        definition=str(data["definition"]),
        overrides=tuple((str(path), str(text)) for path, text in data.get("overrides", [])),
        seed=int(data.get("seed", 0)),
        device=str(data.get("device", "cpu")),
        pipeline=data.get("pipeline", {}),
        versions=data.get("versions", {}),
    )


def _rows_with_step(file: Path) -> list[Row]:
    rows = read_rows(file)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{file}:{number}: this line has no whole number 'step'. Delete it to go on without it.")
    return rows
