"""Sends each step's metrics to a logger of TorchRL: CSV files, TensorBoard, Weights & Biases, MLflow, Trackio."""

from __future__ import annotations

import importlib.util
import uuid
from typing import Any

from rlhf_pipeline.config_text import flat_fields
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.events import Event, EventHandler, StepDone
from rlhf_pipeline.run.folder import RunFolder

_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")
"""Loggers that need a package and module of the same name."""


def with_logger(kind: str | None, run: RunFolder, on_event: EventHandler) -> EventHandler:
    """Return an event handler that also sends the metrics of each step to a logger.

    Local loggers write under `logs` in the run folder. Steps that are in `metrics.jsonl` already, which a resumed run
    takes again, are not sent twice. The definition, seed and device are its hyperparameters, by dotted path; Weights &
    Biases has one run over all resumes, whose id is in `logs/wandb-id.txt`.

    >>> with_logger(None, RunFolder("run"), print) is print
    True
    """
    if kind is None:
        return on_event
    logger = _make(kind, run)
    last_logged = run.rows(run.metrics_file).last_step
    if kind == "wandb" or not last_logged:  # the others take hyperparameters once
        now = RunFolder(run.address).config  # as this process has recorded it
        fields = {path: _plain(value) for path, value in flat_fields(now.pipeline)}
        logger.log_hparams({**fields, "seed": now.seed, "device": now.device})

    def handle(event: Event) -> None:
        on_event(event)
        if isinstance(event, StepDone) and event.step > last_logged:
            for name, value in event.metrics.items():
                if value is not None and name != "step":
                    logger.log_scalar(name, float(value), step=event.step)

    return handle


def check_logger(kind: str | None) -> None:
    """Refuse a logger whose library is not installed."""
    if kind in _PACKAGES and importlib.util.find_spec(kind) is None:
        raise _not_installed(kind, f"there is no module {kind}")


def _make(kind: str, run: RunFolder) -> Any:
    from torchrl.record.loggers import get_logger

    given = {"wandb_kwargs": {"id": _wandb_id(run)}} if kind == "wandb" else {}
    try:
        return get_logger(kind, str(run.logger_files), run.path.name, **given)  # pyright: ignore[reportArgumentType]
    except ImportError as error:
        raise _not_installed(kind, str(error)) from error


def _wandb_id(run: RunFolder) -> str:
    """Return the id of a run at Weights & Biases, which is made at its first start."""
    file = run.logger_files / "wandb-id.txt"
    if not run.bring(file).is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        run.write(file, uuid.uuid4().hex[:12].encode())
    return file.read_text(encoding="ascii").strip()


def _plain(value: Any) -> str | int | float:
    """Return a value as text where a logger takes no such value."""
    return value if isinstance(value, (str, int, float)) else str(value)


def _not_installed(kind: str, why: str) -> DefinitionError:
    return DefinitionError(
        f"learn.logger={kind} cannot be used: {why}. Install it: pip install {kind}. "
        "Or leave learn.logger out; metrics.jsonl has the same figures."
    )
