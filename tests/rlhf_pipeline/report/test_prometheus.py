"""A run's figures as Prometheus text."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.report.prometheus import metrics_served

from .conftest import write_run

parser = pytest.importorskip("prometheus_client.parser")


def scraped(port: int) -> dict[str, float]:
    """Return the samples that a scrape gives, by name and labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    families = parser.text_string_to_metric_families(text)
    return {one.name + "".join(sorted(one.labels.values())): one.value for family in families for one in family.samples}


def test_a_scrape_gives_state_alarms_and_figures(tmp_path: Path):
    """Before the run there is nothing; then step, stored trajectories, health and the newest figures, as in files."""
    with metrics_served(tmp_path / "run", 0) as port:
        assert scraped(port) == {}
        run = write_run(tmp_path / "run")
        found = scraped(port)
        assert found["rlhf_pipeline_step"] == 12
        assert found["rlhf_pipeline_stored_trajectories"] == 48
        assert found["rlhf_pipeline_healthy"] == 0  # nothing runs
        assert found["rlhf_pipeline_alarms"] == 1
        assert found["rlhf_pipeline_alarmpagestopped"] == 1
        assert "rlhf_pipeline_metric_task_reward" in found
        (run / "processes").mkdir()
        (run / "processes" / "learner.json").write_text('{"state": "learning", "time": 1.0}')
        assert scraped(port)["rlhf_pipeline_process_alivelearnerlearning"] == 0
        with (
            pytest.raises(DefinitionError, match=f"--metrics-host localhost --metrics-port {port} cannot be used"),
            metrics_served(run, port),
        ):
            pass


@pytest.mark.parametrize(("host", "is_reachable"), [("localhost", False), ("0.0.0.0", True)])
def test_only_a_named_host_is_reachable_by_other_addresses(tmp_path: Path, host: str, is_reachable: bool):
    """By default the port is bound to localhost alone; another address of the machine is refused."""
    with metrics_served(tmp_path / "run", 0, host) as port, socket.socket() as client:
        assert scraped(port) == {}
        assert (client.connect_ex(("127.0.0.2", port)) == 0) == is_reachable
