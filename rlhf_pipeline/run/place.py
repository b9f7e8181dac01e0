"""The location of a run: a folder, or an object store of which this process has a copy. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.errors import MissingPathError, did_you_mean, typed
from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.address import Address, is_url
from rlhf_pipeline.run.local_place import LocalPlace

if TYPE_CHECKING:
    from rlhf_pipeline.run.remote.mirror import Mirror


def place_of(address: Address) -> LocalPlace | Mirror:
    """Return the place of a run, without a request and without making anything."""
    if not is_url(address):
        return LocalPlace(Path(address))
    from rlhf_pipeline.run.remote.mirror import Mirror

    return Mirror(str(address))


def is_store(path: Address) -> bool:
    """Return True if this folder, or this URL, is a trajectory store."""
    return place_of(path).has("zarr.json")


def not_found(path: Address, kind: str = "run") -> MissingPathError:
    """Return an error that names the runs that exist."""
    if not isinstance(path, Path):
        return MissingPathError(
            f"there is no {kind} at {path}. Create one: rlhf-pipeline run copy_digits --out {typed(path)}"
        )
    runs = sorted({*_runs_in(path.parent), *_runs_in(Path("runs"))})
    runs += [at / filenames.STORE for at in (path, path.parent) if is_store(at / filenames.STORE)]
    if not runs:
        hint = " Create one: rlhf-pipeline run copy_digits"
    else:
        near = did_you_mean(str(path), [str(run) for run in runs if run != path])
        hint = near.replace("Available:", "Runs here:") if len(runs) <= 8 else near.split(" Available:")[0]
    what = f"is not a {kind}" if path.exists() else "does not exist"
    return MissingPathError(f"there is no {kind} at {path}: the folder {what}.{hint}")


def _runs_in(folder: Path) -> list[Path]:
    runs = [config.parent for config in folder.glob(f"*/{filenames.CONFIG}")]
    return [run for run in runs if (run / filenames.METRICS).is_file()]
