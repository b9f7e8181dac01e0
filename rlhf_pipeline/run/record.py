"""The record of a run, `config.json`: what it was started with, and what has changed since. Imports no torch."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import google_crc32c

from rlhf_pipeline import __version__
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.config_diff import acts_differently, changes, definition_at
from rlhf_pipeline.run.inputs import describe_inputs, keep_inputs, place
from rlhf_pipeline.run.local_place import LocalPlace
from rlhf_pipeline.run.place import not_found
from rlhf_pipeline.run.recorded_code import changed_code, describe_code
from trajectory_store.new_files import write_atomically

if TYPE_CHECKING:
    from rlhf_pipeline.run.remote.mirror import Mirror

FORMAT: Final = 1
"""The format of `config.json` that this version reads and writes."""
_IDENTITY: Final = "identity"
"""The form in which a run records code: 2 for the identities of `user_code.identity`; if absent, a hash of the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The content of `config.json`: enough to build the same pipeline again."""

    definition: str
    """A built-in name, or `/abs/file.py:function`."""
    overrides: tuple[tuple[str, str], ...]
    seed: int
    device: str
    pipeline: Mapping[str, Any]
    """The definition as plain data, for people to read; a resume loads the definition itself."""
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    """Number of threads and processor: both can change the last bits of a sum."""
    place: Mapping[str, str]
    """Machine, user and path where it was last started; see `run.inputs.place`."""
    begun_from: Mapping[str, Any] | None
    """The `run` and the `step` whose checkpoint it started from, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings with which a process starts or continues a run."""

    pipeline: Pipeline
    """The definition with overrides applied."""
    definition: str = ""
    """The source of the definition, as in `RunConfig`."""
    overrides: Sequence[tuple[str, str]] = ()
    """The `--set` pairs already applied."""
    seed: int = 0
    """The seed of a newly created model, of the order of the prompts, and of every completion or batch."""
    device: str = "cpu"
    """The device of models, for example `cpu` or `cuda`."""


class RunRecord:
    """The owner of `config.json`.

    Args:
        place: where the run is.
    """

    def __init__(self, place: LocalPlace | Mirror) -> None:
        self._place = place
        self._file: Path = place.root / filenames.CONFIG

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        if not self._file.is_file():
            self._place.bring(filenames.CONFIG)
        return self._file.is_file()

    @property
    def is_of_run(self) -> bool:
        """Whether the file records a run, damaged or not; a model's folder has a `config.json`, too."""
        if not self.exists:
            return False
        with suppress(ValueError):
            recorded = json.loads(self._file.read_bytes())
            return isinstance(recorded, dict) and ("pipeline" in recorded or "format" in recorded)
        return True

    def read(self) -> dict[str, Any]:
        """Return the content of the record, without its checksum.

        Raises:
            MissingPathError: there is no run.
            DataError: the file is damaged or of another format.
        """
        if not self.exists:
            raise not_found(self._place.address)
        file = self._file
        try:
            data: Any = json.loads(file.read_bytes())
        except ValueError as error:
            raise DataError(
                f"{file} is not JSON ({error}). Restore it from a copy, or start a new run with --out OTHER_FOLDER."
            ) from error
        if not isinstance(data, dict) or "definition" not in data:
            raise DataError(f"{file} is not the configuration of a run: it has no 'definition'.")
        if data.get("format") != FORMAT:
            raise DataError(
                f"{file} has format {data.get('format')!r}; this version of rlhf-pipeline reads format {FORMAT}. "
                "Read it with the version that wrote it (see its 'versions'), or upgrade rlhf-pipeline."
            )
        if data.pop("crc32c", None) not in (None, checksum_of(data)):
            raise DataError(
                f"{file} fails its checksum: it was edited or damaged. Restore it from a copy. If the edit "
                "was intended, remove the line that contains crc32c. To change settings, use --resume --set instead."
            )
        return data

    def config(self) -> RunConfig:
        """Return what the run was started with; raises as `read`."""
        data = self.read()
        return RunConfig(
            definition=str(data["definition"]),
            overrides=tuple((str(path), str(text)) for path, text in data.get("overrides", [])),
            seed=int(data.get("seed", 0)),
            device=str(data.get("device", "cpu")),
            pipeline=data.get("pipeline", {}),
            versions=data.get("versions", {}),
            machine=data.get("machine", {}),
            place=data.get("place", {}),
            begun_from=data.get("begun_from"),
        )

    @property
    def history(self) -> list[dict[str, Any]]:
        """The changes of the definition since the run began, each with the first step that was taken with it."""
        return self.read().get("changes", [])

    @property
    def inputs(self) -> dict[str, dict[str, Any]]:
        """The record of the files that the definition named when the run was started; see `run.inputs`."""
        return self.read().get("inputs", {})

    @property
    def is_by_text(self) -> bool:
        """Whether code is compared by its text alone, in a run that was begun before there were identities."""
        return self.exists and _IDENTITY not in self.read()

    def changed_from(self, pipeline: Pipeline, step: int, *, last_step: int) -> bool:
        """Return whether steps from this one on, if any were taken, had settings that gave other figures.

        Args:
            pipeline: the definition now.
            step: the first step to compare.
            last_step: the newest step that was taken.
        """
        before = self.read()
        new = [change.to_json() for change in changes(before["pipeline"], pipeline)]
        history = [*before.get("changes", []), {"from_step": last_step + 1, "fields": new}]
        return any(
            acts_differently(definition_at(pipeline, history, number), pipeline, number)
            for number in range(step, last_step + 1)
        )

    def write(self, setup: Setup, *, begun_from: Mapping[str, object] | None = None, first_step: int = 1) -> bool:
        """Write `config.json` atomically; return False if another process has begun the run in the meantime.

        Args:
            setup: the settings of this process.
            begun_from: the run and the step whose checkpoint a new run begins with, if any.
            first_step: the first step that was taken with these settings, if the run continues with them. They are
                recorded after it: settings that cannot work would stay, and no resume could continue.

        Raises:
            DefinitionError: the definition cannot be recorded.
        """
        again = self.exists
        recorded = self.read() if again else {}
        content = {"format": FORMAT, "definition": setup.definition, "overrides": setup.overrides, "seed": setup.seed}
        by_text = again and _IDENTITY not in recorded
        content |= {} if by_text else {_IDENTITY: 2}
        inputs = describe_inputs(setup.pipeline) | describe_code(setup.pipeline, by_text=by_text)
        content |= {"device": setup.device, "inputs": inputs, "versions": package_versions()}
        content |= {"machine": {**recorded.get("machine", {}), **machine()}, "place": place(self._place.address)}
        begun = begun_from or recorded.get("begun_from")
        content |= {"begun_from": begun} if begun else {}
        # A run that has gone back to an earlier checkpoint takes those steps with its later settings.
        history = [
            {**change, "from_step": min(change["from_step"], first_step)} for change in recorded.get("changes", [])
        ]
        if again:
            code = changed_code(recorded.get("inputs", {}), setup.pipeline, by_text=by_text)
            new = [change.to_json() for change in (*changes(recorded["pipeline"], setup.pipeline), *code)]
            history += [{"from_step": first_step, "fields": new}] if new else []
        content |= {"changes": history} if history else {}
        try:
            content |= {"pipeline": to_json(setup.pipeline)}
            plain_content = json.loads(json.dumps(content))
            text = json.dumps({**plain_content, "crc32c": checksum_of(plain_content)}, indent=1)
        except TypeError as error:
            raise DefinitionError(
                f"the definition cannot be recorded: {error}. Its fields must be dataclasses, functions, text, "
                "numbers, lists or None."
            ) from error
        for copy in keep_inputs(self._place.root, setup.definition, setup.pipeline):
            self._place.keep(copy.relative_to(self._place.root).as_posix())
        if again and self._file.read_bytes() == text.encode():
            return True
        write_atomically(self._file, text.encode())
        if not again:
            return self._place.keep_first(filenames.CONFIG)
        self._place.keep(filenames.CONFIG)
        return True

    def remove(self) -> None:
        """Remove this process's file of the record."""
        self._file.unlink()


def checksum_of(content: Mapping[str, Any]) -> int:
    """Return the CRC32C of a record's content, whatever the order of its fields."""
    return google_crc32c.value(json.dumps(content, sort_keys=True).encode())


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that decide results."""
    packages = ("torch", "torchrl", "tensordict", "transformers", "numpy")
    return {"rlhf-pipeline": __version__, "python": platform.python_version()} | {
        name: version(name) for name in packages
    }


def machine() -> dict[str, Any]:
    """Return what the last bits of a sum depend on; the number of threads only where torch has been imported."""
    torch: Any = sys.modules.get("torch")
    threads = {} if torch is None else {"threads": torch.get_num_threads()}
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        name = next(line.partition(":")[2].strip() for line in cpu.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return {**threads, "processor": name}
