"""Published weights: a folder per version and a pointer that is replaced by one rename.

A run that has lost its last steps takes other steps and gives their weights the same versions. So weights are
identified by the digest of their files: it is in the folders' names, and in the store with each trajectory's version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.run import filenames
from rlhf_pipeline.run.files import (
    folder_digest,
    folder_problem,
    new_folder,
    remove_folder,
)
from rlhf_pipeline.run.folder import RunFolder
from trajectory_store.new_files import sync_path, write_atomically

_NUM_RETAINED = 3
"""Versions that are kept, including the newest."""
_VERSION = re.compile(r"version-(\d{8})(-[0-9a-f]{16})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The content of `latest.json`: the newest weights, and the learner's progress."""

    version: int
    """The number of optimizer steps that produced the weights."""
    next_version: int
    """The version at which the learner begins with the next rollout; above `version` while it updates on one."""
    rollouts_done: int
    """Rollouts that the learner has begun to learn from, or skipped as too old."""
    finished: str | None = None
    """The reason why the run has ended, or None while it continues. Collectors exit when it is set."""
    write_path: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the write path that the learner keeps for all collectors, for example the KL coefficient."""
    digest: int = 0
    """The digest of the weights; 0 in runs that are older than this field."""
    evaluate: dict[int, int] = field(default_factory=dict[int, int])
    """Digests of the weights that collectors must evaluate, by version; kept until they are evaluated."""


def publish(
    run: RunFolder,
    published: Published,
    *,
    save: Callable[[Path], object] | None,
    sync: bool = False,
) -> Published:
    """Publish the weights of a version as the newest.

    Args:
        run: the run folder; its `weights` folder is made if absent.
        published: the version and the learner's progress.
        save: writes the weights into an empty folder; None if those of `published.digest` exist and only the progress
            has changed.
        sync: sync everything to the disk before the pointer names it, so that it survives a power loss.

    Returns:
        The published state, with the digest of its weights.
    """
    folder = run.weights
    folder.mkdir(parents=True, exist_ok=True)
    if save is not None:
        version, digest = published.version, _add(folder, published.version, save, sync=sync)
        requested = published.evaluate | ({version: digest} if version in published.evaluate else {})
        published = replace(published, digest=digest, evaluate=requested)
    target = weights_folder(run, published)
    if save is not None:
        run.keep(target)
    write_atomically(folder / filenames.NEWEST_WEIGHTS, json.dumps(asdict(published)).encode(), sync=sync)
    run.keep(folder / filenames.NEWEST_WEIGHTS)
    earlier = [path for path in sorted(folder.iterdir()) if _VERSION.fullmatch(path.name) and path != target]
    retained = [path for path in earlier if int(path.name.split("-")[1]) < published.version][1 - _NUM_RETAINED :]
    retained += [version_folder(folder, version, digest) for version, digest in published.evaluate.items()]
    for stale in earlier:
        if stale not in retained:  # too old, or of steps that the run has lost
            remove_folder(stale)
            run.drop(stale)
    return published


def _add(folder: Path, version: int, save: Callable[[Path], object], *, sync: bool) -> int:
    """Write weights into a folder that has their digest in its name; return the digest."""
    new = folder / "new"
    with new_folder(new, sync=sync) as temporary:
        save(temporary)
    digest = folder_digest(new)
    target = version_folder(folder, version, digest)
    if target.exists():
        remove_folder(target)
    new.rename(target)
    if sync:
        sync_path(folder)
    return digest


def read_published(run: RunFolder) -> Published | None:
    """Return what was published last, or None if there is nothing (a power loss may take what was not synced)."""
    try:
        fields = json.loads(run.bring(run.weights / filenames.NEWEST_WEIGHTS).read_text(encoding="utf-8"))
        requested = {int(version): digest for version, digest in fields.pop("evaluate", {}).items()}
        return Published(**fields, evaluate=requested)
    except (FileNotFoundError, ValueError):
        return None


def reopen(run: RunFolder) -> None:
    """Withdraw the published end of a run, so that collectors do not leave before its restarted learner is ready."""
    published = read_published(run)
    if published is not None and published.finished is not None and not run.place.is_alive("learner"):
        publish(run, replace(published, finished=None), save=None)
        run.flush()


def version_folder(folder: Path, version: int, digest: int = 0) -> Path:
    """Return where the weights of a version are, or were; without a digest, the name has only the version."""
    return folder / (f"version-{version:08d}" + (f"-{digest:016x}" if digest else ""))


def weights_folder(run: RunFolder, published: Published) -> Path:
    """Return where published weights are, or were."""
    return version_folder(run.weights, published.version, published.digest)


def weights_problem(run: RunFolder, published: Published) -> str | None:
    """Compare every checksum of published weights; return what is wrong, or None."""
    folder = run.bring(weights_folder(run, published))
    problem = folder_problem(folder)
    if problem is None and published.digest not in (0, folder_digest(folder)):
        return "the files differ from those that were published"
    return problem
