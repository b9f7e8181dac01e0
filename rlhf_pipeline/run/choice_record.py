"""The record of what a run over stores learns from: `gather.json`. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.record import checksum_of

RESTORE: Final = "Restore the run from a copy, or start a new run with --out OTHER_FOLDER."


def has_chosen(run: RunFolder) -> bool:
    """Whether a run over stores has recorded its choice of trajectories, which is then final."""
    return run.bring(run.choice_file).is_file()


def recorded_choice(run: RunFolder) -> dict[str, Any] | None:
    """Return the choice that a run over stores has recorded, or None if it has not chosen.

    Raises:
        DataError: the record has changed since it was written.
    """
    if not has_chosen(run):
        return None
    state: Any = None
    try:
        state = json.loads(run.choice_file.read_bytes())
        whole = state.pop("crc32c") == checksum_of(state)
    except (ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise DataError(f"{run.choice_file} fails its checksum. {RESTORE}")
    return state


def record_choice(run: RunFolder, state: Mapping[str, Any]) -> None:
    """Record atomically what a run over stores learns from, JSON-ready."""
    checked = {**state, "crc32c": checksum_of(state)}
    run.write(run.choice_file, json.dumps(checked).encode())


def gathered_counts(run: RunFolder) -> dict[str, int] | None:
    """Return the counts of what a run over stores has copied, or None until it has copied its whole choice."""
    return (recorded_choice(run) or {}).get("gathered")
