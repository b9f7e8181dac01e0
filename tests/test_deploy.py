"""The files for Kubernetes, Slurm and SkyPilot: their form, and that their commands can be typed."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from rlhf_pipeline.cli.parser import parse

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
yaml = pytest.importorskip("yaml")


DIRECTIVES = {"open-mode", "job-name", "ntasks", "cpus-per-task", "mem-per-cpu", "time", "requeue", "signal"}
"""Options of sbatch that the file uses."""


def text_of(name: str) -> str:
    """One of the files."""
    return (DEPLOY / name).read_text(encoding="utf-8")


def test_the_files_have_the_form_of_their_platform():
    """Fields, types and names; no field that the platform does not know."""
    jobs = list(yaml.safe_load_all(text_of("kubernetes.yaml")))
    assert [job["kind"] for job in jobs] == ["Job", "Job"]
    for job in jobs:
        pod = job["spec"]["template"]["spec"]
        (container,), rules = pod["containers"], job["spec"]["podFailurePolicy"]["rules"]
        assert pod["restartPolicy"] == "Never"  # which a failure policy needs
        assert rules[0] == {
            "action": "FailJob",
            "onExitCodes": {"containerName": container["name"], "operator": "In", "values": [2]},
            "onPodConditions": [],
        }
        assert {"memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
    assert yaml.safe_load(text_of("skypilot.yaml"))["resources"]["job_recovery"]["recover_on_exit_codes"] == [3]
    script = text_of("slurm.sh")
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)
    used = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    assert set(used) <= DIRECTIVES
    tasks = [int(number) for number in re.findall(r"--ntasks=(\d+)", script)]
    assert tasks[0] == sum(tasks[1:])


PROBES = {"startupProbe": True, "livenessProbe": True, "readinessProbe": False}
"""The probes of each container, and whether they look at this machine alone."""


def test_probes_that_restart_a_pod_read_the_machine_alone():
    """Startup and liveness read the heartbeat without a request; readiness reads the run, for a few seconds."""
    for job in yaml.safe_load_all(text_of("kubernetes.yaml")):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        for name, is_local in PROBES.items():
            words = shlex.split(" ".join(container[name]["exec"]["command"]).replace("$JOB_COMPLETION_INDEX", "7"))
            args = parse(words[words.index("rlhf-pipeline") + 1 :])
            assert (args.command, args.check, args.local) == ("status", True, is_local)
            assert args.process == container["name"].replace("collector", "collector-7")
            assert is_local or "TRAJECTORY_STORE_PATIENCE_S=20" in words


VERSIONS = ["1.27", "1.30", "1.37"]
"""The versions of Kubernetes that docs/many_machines.md names."""


def test_the_page_names_the_versions_that_are_checked():
    """No version is promised without a check."""
    page = (DEPLOY.parent / "docs" / "many_machines.md").read_text(encoding="utf-8")
    promised = re.search(r"full schemas of Kubernetes ([\d., and]+)\b", page)
    assert promised is not None
    assert re.findall(r"\d\.\d+", promised[1]) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_its_file(version: str):
    """The whole schemas of its API, in which no unknown field is allowed."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for job in yaml.safe_load_all(text_of("kubernetes.yaml")):
        kubernetes_validate.validate(job, version, strict=True)


def test_skypilot_takes_its_file():
    """The whole schemas that its commands check a task by."""
    common_utils, schemas = (pytest.importorskip(f"sky.utils.{name}") for name in ("common_utils", "schemas"))
    task = yaml.safe_load(text_of("skypilot.yaml"))
    common_utils.validate_schema(task, schemas.get_task_schema(), "not a task: ")
    common_utils.validate_schema(task["resources"], schemas.get_resources_schema(), "not resources: ")


def test_every_command_in_the_files_can_be_typed():
    """The learner and the collectors of each, with options that exist."""
    jobs = list(yaml.safe_load_all(text_of("kubernetes.yaml")))
    found = [job["spec"]["template"]["spec"]["containers"][0]["command"] for job in jobs]
    for name in ("slurm.sh", "skypilot.yaml"):
        lines = re.findall(r"(rlhf-pipeline (?:learn|collect) [^&\n]*)", text_of(name))
        assert len(lines) == 2
        found += [shlex.split(line) for line in lines]
    for command in found:
        args = parse([word.replace("$(JOB_COMPLETION_INDEX)", "7") for word in command[1:]])
        assert args.command in ("learn", "collect")
        assert args.run


COMMANDS = {
    "srun": 'shift 2; exec "$@"\n',
    "scancel": 'for pid in $(cat "$PIDS"); do kill -TERM "$pid"; done\n',
    "scontrol": 'echo "$@" >> "$NOTES"\n',
    "rlhf-pipeline": 'trap \'sleep 0.3; echo "$1 saved" >> "$NOTES"; exit 143\' TERM; echo "$$ $PPID" >> "$PIDS"\n'
    'echo "$1 begins" >> "$NOTES"; while true; do sleep 0.05; done\n',
}
"""Stand-ins for those of Slurm and for the two commands, as programs; `scancel` signals every process of the steps."""


def test_a_slurm_job_saves_and_is_requeued_before_its_time_limit(tmp_path: Path):
    """The warning reaches the script alone; learner and collectors save once, and the job is requeued."""
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)
    notes, pids = tmp_path / "notes", tmp_path / "pids"
    own = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NOTES": str(notes), "PIDS": str(pids), "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", DEPLOY / "slurm.sh"], env=own) as job:
        while not pids.exists() or len(pids.read_text().splitlines()) < 2:
            time.sleep(0.05)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 0
    said = notes.read_text().splitlines()
    assert sorted(said[:-1]) == ["collect begins", "collect saved", "learn begins", "learn saved"]
    assert said[-1] == "requeue 7"
