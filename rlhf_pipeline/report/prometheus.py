"""A run's state, alarms and newest figures as Prometheus text, for scraping: `--metrics-port`."""

from __future__ import annotations

import importlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from rlhf_pipeline.errors import DefinitionError, PipelineError
from rlhf_pipeline.report.query import View
from rlhf_pipeline.report.status import status
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.lookup import is_run
from trajectory_store import StoreError

LOCALHOST: Final = "localhost"
_PREFIX = "rlhf_pipeline_"
_ROWS = 16


@contextmanager
def metrics_served(run_dir: Address, port: int, host: str = LOCALHOST) -> Iterator[int]:
    """Serve a run's metrics at a port of this machine while the block runs; yield the port.

    Args:
        run_dir: the run; it need not exist yet.
        port: the port; 0 takes a free one.
        host: the address to listen at: `localhost` for this machine alone, `0.0.0.0` for all of its addresses.

    Raises:
        DefinitionError: prometheus-client is not installed, or the address cannot be used.
    """
    try:
        client: Any = importlib.import_module("prometheus_client")
    except ImportError as error:
        raise DefinitionError(
            "--metrics-port needs prometheus-client, which cannot be imported. Install it: "
            "pip install prometheus-client"
        ) from error
    registry = client.CollectorRegistry()
    registry.register(_RunMetrics(run_dir, client))
    try:
        server, thread = client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise DefinitionError(
            f"--metrics-host {host} --metrics-port {port} cannot be used: {error}. Choose another port or host."
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _RunMetrics:
    """Returns the output of `status` and the newest figures on each request."""

    def __init__(self, run_dir: Address, client: Any) -> None:
        self._run_dir = run_dir
        self._gauge = client.metrics_core.GaugeMetricFamily
        self._reading = threading.Lock()

    def describe(self) -> list[Any]:
        """Return nothing: the metrics of a run are unknown before its first step."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; none while an earlier scrape still waits for an object store."""
        if not self._reading.acquire(blocking=False):
            return
        try:
            yield from self._samples()
        finally:
            self._reading.release()

    def _samples(self) -> Iterator[Any]:
        if not is_run(self._run_dir):
            return
        now = time.time()
        try:
            view = View(self._run_dir)
            try:
                state, rows = status(view, now), view.metrics_rows()
                # Some figures are in a rollout's first step only.
                newest = {name: figure for row in rows[-_ROWS:] for name, figure in row.items() if figure is not None}
            finally:
                view.close()
        except (PipelineError, StoreError):  # a file that is being replaced: the next scrape sees it
            return
        gauges = {
            "healthy": not any(alarm["severity"] == "page" for alarm in state["alarms"]),
            "alarms": len(state["alarms"]),
            "step": state["step"] or 0,
            "steps": state["of"],
            "stored_trajectories": state["stored"],
            "failed_trajectories": state["failed"],
            "disk_bytes": state["bytes"],
            "disk_bytes_per_hour": state["bytes_per_hour"],
        }
        for name, figure in gauges.items():
            if figure is not None:
                yield self._gauge(_PREFIX + name, f"{name} of the run", value=float(figure))
        for name, figure in newest.items():
            if name not in ("step", "time") and isinstance(figure, (int, float)):
                yield self._gauge(f"{_PREFIX}metric_{metric_name(name)}", f"the newest {name}", value=float(figure))
        active = self._gauge(f"{_PREFIX}alarm", "1 for each alarm", labels=["name", "severity", "process"])
        for alarm in state["alarms"]:
            active.add_metric([alarm["name"], alarm["severity"], alarm["process"] or ""], 1.0)
        yield active
        alive = self._gauge(f"{_PREFIX}process_alive", "1 if the process is alive", labels=["process", "state"])
        silent = self._gauge(
            f"{_PREFIX}process_silent_seconds", "seconds since the last report of the process", labels=["process"]
        )
        for process in state["processes"]:
            alive.add_metric([process["name"], str(process.get("state"))], float(process["alive"]))
            if process["seen"] is not None:
                silent.add_metric([process["name"]], max(now - process["seen"], 0.0))
        yield alive
        yield silent


def metric_name(figure: str) -> str:
    """Return the name of a metric in the form that Prometheus accepts.

    >>> metric_name("evaluation/pass@4"), metric_name("kl_k1")
    ('evaluation_pass_4', 'kl_k1')
    """
    return re.sub(r"\W", "_", figure)
