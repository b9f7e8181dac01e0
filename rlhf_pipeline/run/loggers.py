"""Sends each step's metrics to a logger of TorchRL: CSV files, TensorBoard, Weights & Biases, MLflow, Trackio."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.events import Event, EventHandler, StepDone
from rlhf_pipeline.run.folder import RunFolder

_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")
"""Loggers that need a package and module of the same name."""


def with_logger(kind: str | None, run: RunFolder, on_event: EventHandler) -> EventHandler:
    """Return an event handler that also sends the metrics of each step to a logger.

    Local loggers write under `logs` in the run folder. Steps that are in `metrics.jsonl` already, which a resumed run
    takes again, are not sent twice.

    Args:
        kind: a logger of TorchRL, as in `learn.logger`; None returns `on_event` itself.
        run: the run folder.
        on_event: receives everything first.

    Raises:
        DefinitionError: the logger's library is not installed.

    >>> with_logger(None, RunFolder("run"), print) is print
    True
    """
    if kind is None:
        return on_event
    logger = _make(kind, run.logger_files, run.path.name)
    last_logged = run.rows(run.metrics_file).last_step

    def handle(event: Event) -> None:
        on_event(event)
        if isinstance(event, StepDone) and event.step > last_logged:
            for name, value in event.metrics.items():
                if value is not None and name != "step":
                    logger.log_scalar(name, float(value), step=event.step)

    return handle


def check_logger(kind: str | None) -> None:
    """Refuse a logger whose library is not installed.

    Raises:
        DefinitionError: the library is not installed; the message says what to install.
    """
    if kind in _PACKAGES and importlib.util.find_spec(kind) is None:
        raise _not_installed(kind, f"there is no module {kind}")


def _make(kind: str, folder: Path, name: str) -> Any:
    from torchrl.record.loggers import get_logger

    try:
        return get_logger(kind, str(folder), name)  # pyright: ignore[reportArgumentType]
    except ImportError as error:
        raise _not_installed(kind, str(error)) from error


def _not_installed(kind: str, why: str) -> DefinitionError:
    return DefinitionError(
        f"learn.logger={kind} cannot be used: {why}. Install it: pip install {kind}. "
        "Or leave learn.logger out; metrics.jsonl has the same figures."
    )
