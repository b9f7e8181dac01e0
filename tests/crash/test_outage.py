"""The pods of deploy/kubernetes.yaml during an outage of their bucket, with its own commands and probes.

CI compresses the hour into 24 seconds, and the times of the file by the same factor. The nightly run takes the hour.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.run.folder import RunFolder
from tests.crash._s3 import missing, serve
from tests.processes import Children

yaml = pytest.importorskip("yaml")
pytestmark = [
    pytest.mark.crash,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(5400),
]

HOUR_S = 3600.0
DEFINITION = """
from tests.crash.kills import tiny

def outage():
    return tiny(learn__steps="6")
"""


@dataclass
class Pod:
    """A container of the file on this machine: its process, and its probes as a kubelet runs them."""

    container: dict[str, Any]
    url: str
    folder: Path
    children: Children
    scale: float
    """Of the times in the file: 1 leaves them unchanged."""
    failures: Counter[str] = field(default_factory=Counter)
    """Consecutive failures by probe."""
    worst: Counter[str] = field(default_factory=Counter)
    """The most consecutive failures by probe."""

    def __post_init__(self) -> None:
        self.folder.mkdir()
        (self.folder / "outage.py").write_text(DEFINITION)
        patience = {entry["name"]: self._compressed(entry["value"]) for entry in self.container["env"]}
        self.env = {**os.environ, **patience, "RLHF_PIPELINE_CACHE": str(self.folder)}
        self.env |= {"JOB_COMPLETION_INDEX": "0", "OMP_NUM_THREADS": "1"}
        self.env |= {"RLHF_PIPELINE_LEASE_S": "4"} if self.scale < 1 else {}
        words = self._words(self.container["command"])
        words[words.index("long_running")] = f"{self.folder / 'outage.py'}:outage"
        at = words.index("--progress-timeout") + 1
        words[at] = self._compressed(words[at])
        for option in ("--metrics-port", "--metrics-host"):
            if option in words:
                del words[(at := words.index(option)) : at + 2]
        self.process = self.children.program(*words, env=self.env, name=self.container["name"])

    def _compressed(self, seconds: str) -> str:
        return str(float(seconds) * self.scale)

    def _words(self, command: list[str]) -> list[str]:
        """Return the words of a command of the file, for this bucket and this interpreter."""
        if command[0] == "sh":
            command = [word for word in shlex.split(command[2]) if word != "exec"]
            command = ["env", *command] if "=" in command[0] else command
        words = [word.replace("$(JOB_COMPLETION_INDEX)", "0").replace("$JOB_COMPLETION_INDEX", "0") for word in command]
        words = [word.replace("s3://bucket/run", self.url) for word in words]
        if self.scale < 1:
            words = [word.replace("_PATIENCE_S=20", "_PATIENCE_S=0.2") for word in words]
        at = words.index("rlhf-pipeline")
        return [*words[:at], sys.executable, "-m", "rlhf_pipeline", *words[at + 1 :]]

    def probe(self, name: str) -> bool:
        """Run one of the probes; return whether it succeeds."""
        command = self._words(self.container[name]["exec"]["command"])
        success = subprocess.run(command, env=self.env, capture_output=True, timeout=60).returncode == 0
        self.failures[name] = 0 if success else self.failures[name] + 1
        self.worst[name] = max(self.worst[name], self.failures[name])
        return success


@pytest.mark.parametrize("outage_s", [24.0, pytest.param(HOUR_S, marks=pytest.mark.nightly)])
def test_an_outage_of_an_hour_terminates_no_process(tmp_path: Path, children: Children, outage_s: float):
    """Liveness stays, readiness fails, no process ends, and after the outage the run comes to its end."""
    scale = outage_s / HOUR_S
    file = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes.yaml"
    containers = [job["spec"]["template"]["spec"]["containers"][0] for job in yaml.safe_load_all(file.read_text())]
    with serve(tmp_path, seed=5) as rig:
        pods = [Pod(container, rig.url, tmp_path / container["name"], children, scale) for container in containers]
        first = pods[0].process
        first.until(lambda: all(pod.probe("startupProbe") for pod in pods), seconds=120, every=0.2)
        first.until(lambda: len(RunFolder(rig.url).metrics), seconds=120, every=0.2)
        rig.cut(outage_s)
        until = time.monotonic() + outage_s
        while time.monotonic() < until - 2:
            for pod in pods:
                pod.probe("livenessProbe")
                assert pod.process.poll() is None, pod.process.output()
            pods[0].probe("readinessProbe")
            time.sleep(scale * pods[0].container["livenessProbe"]["periodSeconds"])
        for pod in pods:
            assert pod.worst["livenessProbe"] < pod.container["livenessProbe"]["failureThreshold"]
            assert pod.worst["livenessProbe"] == 0
        assert pods[0].worst["readinessProbe"] >= 2  # the probe that restarted pods before reads the bucket
        for pod in pods:
            pod.process.succeed(300)
        rig.calm()
        assert [row["step"] for row in RunFolder(rig.url).metrics] == list(range(1, 7))
