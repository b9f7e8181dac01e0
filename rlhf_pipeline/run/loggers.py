"""Sends each step's metrics to a logger of TorchRL: CSV files, TensorBoard, Weights & Biases, MLflow, Trackio."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Callable
from typing import Any, Final

from rlhf_pipeline.config import Learn
from rlhf_pipeline.config_text import flat_fields, to_json
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.events import Event, EventHandler, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.record import Setup

_PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")
"""Loggers that need a package and a module of the same name."""


Samples = Callable[[int, int], list[list[Any]]]
"""Returns rows of `SAMPLE` for this many of the trajectories that a step learned from."""

SAMPLE: Final = ("prompt", "completion", "task_reward", "advantage")
"""The columns of a table of samples."""


def with_logger(
    setup: Setup, run: RunFolder, on_event: EventHandler, samples: Samples = lambda step, most: []
) -> EventHandler:
    """Return an event handler that also sends the metrics of each step to a logger.

    Local loggers write under `logs` in the run folder. Steps that are in `metrics.jsonl` already, which a resumed run
    takes again, are not sent twice. The definition, seed and device are its hyperparameters, by dotted path; Weights &
    Biases has one run over all resumes, whose id is in `logs/wandb-id.txt`.

    >>> from rlhf_pipeline import CopyDigits, Pipeline, TinyPolicy, token_match
    >>> asked = Pipeline(name="quiet", policy=TinyPolicy(), prompts=CopyDigits(), reward=token_match)
    >>> with_logger(Setup(pipeline=asked), RunFolder("run"), print) is print
    True
    """
    learn, kind = setup.pipeline.learn, setup.pipeline.learn.logger
    if kind is None:
        return on_event
    logger = _make(learn, kind, run)
    last_logged = run.rows(run.metrics_file).last_step
    if kind == "wandb" or not last_logged:  # the others take hyperparameters once
        fields = {path: _plain(value) for path, value in flat_fields(to_json(setup.pipeline))}
        logger.log_hparams({**fields, "seed": setup.seed, "device": setup.device})

    def handle(event: Event) -> None:
        on_event(event)
        if isinstance(event, StepDone) and event.step > last_logged:
            for name, value in event.metrics.items():
                if name != "step" and isinstance(value, (int, float)):
                    logger.log_scalar(name, float(value), step=event.step)
            if learn.logger_samples:
                _log_table(logger, samples(event.step, learn.logger_samples), event.step)

    return handle


def check_logger(kind: str | None) -> None:
    """Reject a logger whose library is not installed."""
    if kind in _PACKAGES and importlib.util.find_spec(kind) is None:
        raise _not_installed(kind, f"there is no module {kind}")


def _make(learn: Learn, kind: str, run: RunFolder) -> Any:
    from torchrl.record.loggers import get_logger

    project = {} if learn.logger_project is None else {"project": learn.logger_project}
    options: dict[str, Any] = {}
    if kind == "wandb":
        options["wandb_kwargs"] = {"id": _wandb_id(run), **project, "tags": list(learn.logger_tags) or None}
    elif kind == "trackio":
        options["trackio_kwargs"] = project
    name = run.path.name if learn.logger_name is None else learn.logger_name
    try:
        return get_logger(kind, str(run.logger_files), name, **options)  # pyright: ignore[reportArgumentType]
    except ImportError as error:
        raise _not_installed(kind, str(error)) from error


def _log_table(logger: Any, rows: list[list[Any]], step: int) -> None:
    """Send a table of samples to Weights & Biases; each step's replaces the one before in the page, and is kept."""
    import wandb  # pyright: ignore[reportMissingImports] - an extra

    table = wandb.Table(columns=["step", *SAMPLE], data=[[step, *row] for row in rows])
    logger.experiment.log({"samples": table})


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
        f"learn.logger={kind} cannot be used: {why}. Install it: pip install {kind}. Or omit learn.logger; "
        "metrics.jsonl has the same metrics."
    )
