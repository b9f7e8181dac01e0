"""The files for Kubernetes, Slurm and SkyPilot: their form, and that their commands can be typed."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.cli.parser import parse

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")


def of(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
CONTAINER = of(
    {"name": TEXT, "image": TEXT, "command": {"type": "array", "items": TEXT}},
    {
        "envFrom": {"type": "array", "items": of({"secretRef": of({"name": TEXT})})},
        "resources": of({"requests": of({"cpu": TEXT, "memory": {"type": "string", "pattern": r"^\d+[MG]i$"}})}),
    },
)
POD = of(
    {"restartPolicy": {"enum": ["OnFailure", "Never"]}, "containers": {"type": "array", "items": CONTAINER}},
    {"terminationGracePeriodSeconds": COUNT},
)
JOB = of(
    {
        "apiVersion": {"const": "batch/v1"},
        "kind": {"const": "Job"},
        "metadata": of({"name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}}),
        "spec": of(
            {"template": of({"spec": POD})},
            {
                "backoffLimit": COUNT,
                "completions": COUNT,
                "parallelism": COUNT,
                "completionMode": {"enum": ["Indexed", "NonIndexed"]},
            },
        ),
    }
)
"""What the files use of the API of Kubernetes 1.30, batch/v1."""
TASK = of(
    {"run": TEXT},
    {
        "name": TEXT,
        "num_nodes": COUNT,
        "setup": TEXT,
        "envs": {"type": "object", "additionalProperties": TEXT},
        "resources": of({}, {"cpus": TEXT, "memory": {"type": ["string", "integer"]}, "use_spot": {"type": "boolean"}}),
    },
)
"""What the file uses of a SkyPilot task."""
DIRECTIVES = {"job-name", "ntasks", "cpus-per-task", "mem-per-cpu", "time", "requeue", "signal"}
"""Options of sbatch that the file uses."""


def text_of(name: str) -> str:
    """One of the files."""
    return (DEPLOY / name).read_text(encoding="utf-8")


def test_the_files_have_the_form_of_their_platform():
    """Fields, types and names; no field that the platform does not know."""
    jobs = list(yaml.safe_load_all(text_of("kubernetes.yaml")))
    assert len(jobs) == 2
    for job in jobs:
        jsonschema.validate(job, JOB)
    jsonschema.validate(yaml.safe_load(text_of("skypilot.yaml")), TASK)
    script = text_of("slurm.sh")
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)
    used = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    assert set(used) <= DIRECTIVES
    tasks = [int(number) for number in re.findall(r"--ntasks=(\d+)", script)]
    assert tasks[0] == sum(tasks[1:])


@pytest.mark.parametrize("version", ["1.30", "1.37"])
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
        args = parse(command[1:])
        assert args.command in ("learn", "collect")
        assert args.run
