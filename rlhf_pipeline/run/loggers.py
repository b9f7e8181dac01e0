"""Each step's metrics to a logger of TorchRL: CSV files, TensorBoard, Weights & Biases, MLflow, Trackio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.events import Event, EventHandler, StepDone
from rlhf_pipeline.run.rows import StepRows

_INSTALL = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def with_logger(kind: str | None, run_dir: Path, on_event: EventHandler) -> EventHandler:
    """Return an event handler that also sends the metrics of each step to a logger.

    Figures go under `run_dir/logs`. Steps that `metrics.jsonl` holds already, which a resumed run takes again, are not
    sent twice.

    Args:
        kind: a logger of TorchRL, as in `learn.logger`; None returns `on_event` itself.
        run_dir: the run folder.
        on_event: is told of everything first.

    Raises:
        DefinitionError: the logger's library is not installed.

    >>> with_logger(None, Path("run"), print) is print
    True
    """
    if kind is None:
        return on_event
    logger = _make(kind, run_dir)
    last_logged = StepRows(run_dir / "metrics.jsonl").last_step

    def handle(event: Event) -> None:
        on_event(event)
        if isinstance(event, StepDone) and event.step > last_logged:
            for name, value in event.metrics.items():
                if value is not None and name != "step":
                    logger.log_scalar(name, float(value), step=event.step)

    return handle


def _make(kind: str, run_dir: Path) -> Any:
    from torchrl.record.loggers import get_logger

    try:
        return get_logger(kind, str(run_dir / "logs"), run_dir.name)  # pyright: ignore[reportArgumentType]
    except ImportError as error:
        raise DefinitionError(
            f"learn.logger={kind} cannot be used: {error}. Install it: pip install {_INSTALL.get(kind, kind)}. "
            "Or leave learn.logger out; metrics.jsonl has the same figures."
        ) from error
