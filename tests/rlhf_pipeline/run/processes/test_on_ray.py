"""What `--ray` needs, and says where it is not there; `tests/crash/test_ray.py` runs on a cluster."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.processes.on_ray import HERE, on_ray


@pytest.mark.parametrize("there", [None, SimpleNamespace(__version__="2.49.1")], ids=["absent", "too old"])
def test_without_ray_the_line_to_type_is_reported(tmp_path, monkeypatch, there):
    """One sentence, before anything is made."""
    monkeypatch.setitem(sys.modules, "ray", there)
    with (
        pytest.raises(DefinitionError, match=r"pip install 'rlhf-pipeline\[ray\]'"),
        on_ray(HERE, tmp_path / "run", processes=2, collector_gpus=0.0, learner_gpus=0.0),
    ):
        pass
    assert not (tmp_path / "run").exists()


def test_how_many_processes_ray_places_has_to_be_said(tmp_path, capsys):
    """`--ray` without `--collectors` would place nothing."""
    assert main(["run", "copy_digits", "--ray", "--out", str(tmp_path / "run")]) == 2
    assert "--collectors 2" in capsys.readouterr().err


def test_a_cluster_elsewhere_does_not_see_a_folder(tmp_path):
    """The message says what to give instead."""
    pytest.importorskip("ray")
    with (
        pytest.raises(DefinitionError, match=r"--out s3://bucket/run"),
        on_ray("ray://somewhere:10001", tmp_path / "run", processes=2, collector_gpus=0.0, learner_gpus=0.0),
    ):
        pass
