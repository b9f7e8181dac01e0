"""The temperature at which stored trajectories were sampled, and at which a replay scores them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.config import Collect, Pipeline
from rlhf_pipeline.data.keys import TEMPERATURE, column_name
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.run.choice_record import gathered_counts
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.selection import Choice, open_sources
from trajectory_store import TrajectoryStore

_ROWS = 256
LOG_PROBS = "log_probs"
Ints = npt.NDArray[np.int64]


def sampled_at(parts: Iterable[tuple[TrajectoryStore, Ints | None]]) -> float | None:
    """Return the temperature of scoring that the behaviour log-probs of trajectories have, or None if none records it.

    The importance ratio is `exp(log pi(a; T) - log mu(a; T))` with the `T` of sampling on both sides. At `T = 0` the
    most probable token was taken and its log-prob is that at 1.

    Args:
        parts: stores, each with the rows to look at, int64 `[n]`, or None for all of them.
    """
    temperatures: set[float] = set()
    for store, rows in parts:
        if TEMPERATURE in store.schema:
            values = store.read_scalars(column_name(TEMPERATURE), rows)
            temperatures |= {float(str(value)) or 1.0 for value in np.unique(values[np.isfinite(values)])}
    if len(temperatures) > 1:
        heats = " and ".join(f"{heat:g}" for heat in sorted(temperatures))
        raise DataError(
            f"the trajectories were sampled at the temperatures {heats}, but importance ratios need a "
            f"single temperature. Select one: --set replay.filters='temperature=={max(temperatures):g}'"
        )
    return temperatures.pop() if temperatures else None


def unknown_among(store: TrajectoryStore, rows: Ints | None = None) -> bool:
    """Return True if behaviour log-probs are stored, and the temperature that they are at is not.

    Rows without log-probs get those of the model that is learned with, at the temperature that it is scored at.
    """
    rows = np.asarray(store.ids() if rows is None else rows)
    if not len(rows) or LOG_PROBS not in store.schema:
        return False
    if TEMPERATURE in store.schema:
        rows = rows[np.isnan(store.read_scalars(column_name(TEMPERATURE), rows))]
    for first in range(0, len(rows), _ROWS):
        log_probs = store.read(rows[first : first + _ROWS], [LOG_PROBS])[LOG_PROBS]
        if any(not np.isnan(scores).all() for scores in log_probs):
            return True
    return False


def check_known(pipeline: Pipeline, overrides: Iterable[tuple[str, str]], choice: Choice) -> None:
    """Ask for the temperature of a replay's trajectories where neither they nor the definition specifies it."""
    if "collect.temperature" in dict(overrides) or pipeline.collect.temperature != Collect().temperature:
        return
    with open_sources([source.path for source in choice.sources]) as stores:
        for number, store in enumerate(stores):
            if unknown_among(store, choice.row[choice.source == number]):
                raise DefinitionError(
                    f"{choice.sources[number].path} has log-probs, but the temperature at which its trajectories "
                    "were sampled is unknown, and ratios must be computed at this temperature. Specify it: --set "
                    f"collect.temperature={Collect().temperature:g}"
                )


def replayed_at(run: RunFolder, choice: Choice) -> float | None:
    """Return `sampled_at` of the rows that a run over stores learns from: of its store, if it is complete."""
    if gathered_counts(run) is not None:
        with TrajectoryStore.open(run.store_path) as run_store:
            return sampled_at([(run_store, None)])
    with open_sources([source.path for source in choice.sources]) as stores:
        return sampled_at((store, choice.row[choice.source == number]) for number, store in enumerate(stores))
