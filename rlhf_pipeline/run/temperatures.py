"""The temperature at which stored trajectories were sampled, and at which a replay scores them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.data.keys import TEMPERATURE, column_name
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.selection import Choice, open_sources
from trajectory_store import TrajectoryStore

Ints = npt.NDArray[np.int64]


def sampled_at(parts: Iterable[tuple[TrajectoryStore, Ints | None]]) -> float | None:
    """Return the temperature of scoring that the behaviour log-probs of trajectories have, or None if none says.

    The importance ratio is `exp(log pi(a; T) - log mu(a; T))` with the `T` of sampling on both sides. At `T = 0` the
    most probable token was taken and its log-prob is that at 1.

    Args:
        parts: stores, each with the rows to look at, int64 `[n]`, or None for all of them.
    """
    found: set[float] = set()
    for store, rows in parts:
        if TEMPERATURE in store.schema:
            values = store.read_scalars(column_name(TEMPERATURE), rows)
            found |= {float(str(value)) or 1.0 for value in np.unique(values[np.isfinite(values)])}
    if len(found) > 1:
        heats = " and ".join(f"{heat:g}" for heat in sorted(found))
        raise DataError(
            f"the trajectories were sampled at the temperatures {heats}, and a ratio to their log-probs needs one. "
            f"Choose those of one: --set replay.filters='temperature=={max(found):g}'"
        )
    return found.pop() if found else None


def replayed_at(run: RunFolder, choice: Choice) -> float | None:
    """Return `sampled_at` of what a run over stores learns from: of its own store, if it has gathered all of it."""
    if run.gathered() is not None:
        with TrajectoryStore.open(run.store_path) as own:
            return sampled_at([(own, None)])
    with open_sources([source.path for source in choice.sources]) as stores:
        return sampled_at((store, choice.row[choice.source == number]) for number, store in enumerate(stores))
