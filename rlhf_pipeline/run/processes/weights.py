"""Published weights: a folder per version and a pointer that is replaced in one rename."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_pipeline.run.files import folder_problem, new_folder, remove_folder, write_atomically
from rlhf_pipeline.run.folder import RunFolder

_POINTER = "latest.json"
_VERSION = re.compile(r"version-(\d{8})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What `latest.json` says: the newest weights, and how far the learner is."""

    version: int
    """Optimizer steps behind the weights."""
    next_version: int
    """The version at which the learner begins with the next rollout; above `version` while it updates on one."""
    rollouts_done: int
    """Rollouts that the learner has begun to learn from, or passed over as too old."""
    finished: str | None = None
    """Why the run has ended, or None while it goes on. Collectors leave when they see it."""
    write_path: dict[str, Any] = field(default_factory=dict[str, Any])
    """State of the write path that the learner keeps for all collectors, for example the KL coefficient."""


def publish(
    run: RunFolder,
    published: Published,
    *,
    save: Callable[[Path], None] | None,
    keep: int = 3,
    sync: bool = False,
) -> None:
    """Make weights of a version the newest ones.

    Args:
        run: the run folder; its `weights` folder is made if absent.
        published: the version and the learner's progress.
        save: writes the weights into an empty folder; None if this version's folder is there and only the progress
            has changed.
        keep: how many versions to keep.
        sync: have all of it on the disk before the pointer names it, so that it survives a power loss.
    """
    folder = run.weights
    folder.mkdir(parents=True, exist_ok=True)
    target = version_folder(folder, published.version)
    if save is not None:
        with new_folder(target, sync=sync) as temporary:
            save(temporary)
        run.keep(target)
    write_atomically(folder / _POINTER, json.dumps(asdict(published)).encode(), sync=sync)
    run.keep(folder / _POINTER)
    for old in sorted(path for path in folder.iterdir() if _VERSION.fullmatch(path.name))[:-keep]:
        if old != target:
            remove_folder(old)
            run.drop(old)


def read_published(run: RunFolder) -> Published | None:
    """Return what was published last, or None if nothing was (or a power loss took it; it is not synced)."""
    try:
        return Published(**json.loads(run.bring(run.weights / _POINTER).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def reopen(run: RunFolder) -> None:
    """Take back that the run has ended, or collectors leave before its learner, which imports torch first, goes on."""
    published = read_published(run)
    if published is not None and published.finished is not None and not run.medium.is_alive("learner"):
        publish(run, replace(published, finished=None), save=None)
        run.medium.flush()


def version_folder(folder: Path, version: int) -> Path:
    """Return where the weights of a version are, or were."""
    return folder / f"version-{version:08d}"


def weights_problem(run: RunFolder, version: int) -> str | None:
    """Say what is wrong with the published weights of a version, every checksum compared, or return None."""
    return folder_problem(run.bring(version_folder(run.weights, version)))
