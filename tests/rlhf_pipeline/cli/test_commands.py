"""The commands that look: list, inspect, show, verify, report, doctor."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline.cli import doctor

from .conftest import Cli


def test_list(cli: Cli):
    """Each pipeline has its description and its needs."""
    shown = cli("list")
    assert shown.code == 0
    assert "copy_digits\n    copy four digits" in shown.out
    assert "gsm8k\n" in shown.out
    assert "needs: nothing" in shown.out


def test_list_of_files(cli: Cli, tmp_path: Path):
    """Own files can be listed; a broken one is a line on stderr and the others are shown."""
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text((Path(__file__).parents[3] / "pipelines" / "copy_digits.py").read_text())
    bad.write_text("1 / 0\n")
    shown = cli("list", bad, good)
    assert shown.code == 2
    assert f"{good}:copy_digits" in shown.out
    assert "ZeroDivisionError" in shown.err


def test_inspect(cli: Cli, run_dir: Path):
    """Counts and the agreement of the rewards are said."""
    shown = cli("inspect", run_dir, "--grade")
    assert shown.code == 0
    assert "trajectories  48 in 12 groups of 4" in shown.out
    assert "graded again by rlhf_pipeline:token_match" in shown.out
    assert "agrees: 48 trajectories" in shown.out
    assert "agrees: 6 rollouts; every mean equals the task_reward in metrics.jsonl" in shown.out
    data = json.loads(cli("inspect", run_dir, "--grade", "--json").out)
    assert (data["reward_check"]["agrees"], data["group_sizes"]) == (True, {"4": 12})


def test_counts_of_some(cli: Cli, run_dir: Path):
    """`stats` counts what meets conditions; `ledger`, `group` and `ls` say what steps, groups and runs have."""
    shown = cli("stats", run_dir, "--filter", "group<3")
    assert "  trajectories  12 in 3 groups of 4" in shown.out
    assert "  policy        versions 0 to 2 (2 versions)" in shown.out
    assert json.loads(cli("stats", run_dir, "--filter", "group<3", "--json").out)["completion_tokens"] == 48
    assert cli("ledger", run_dir, "-n", 2).out.splitlines()[1].split() == ["11", "8", "0.00", "0", "48"]
    assert len(cli("group", run_dir).out.splitlines()) == 13
    members = cli("group", run_dir, 3).out.splitlines()
    assert members[0].startswith("group 3: 4 members, mean reward ")
    assert len(members) == 7
    assert cli("ls", run_dir).out.splitlines()[1].split()[1:3] == ["12", "300"]


def test_ls_beside_other_folders(cli: Cli, run_dir: Path):
    """A model's folder is no run, and a damaged run is named and hides no other."""
    for name, content in (("tiny-model", '{"model_type": "llama", "architectures": []}'), ("adapter", '{"r": 8}')):
        (run_dir.parent / name).mkdir()
        (run_dir.parent / name / "config.json").write_text(content)
    shown = cli("ls", run_dir.parent)
    assert [line.split()[0] for line in shown.out.splitlines()] == ["run", str(run_dir)]
    (run_dir.parent / "torn").mkdir()
    (run_dir.parent / "torn" / "config.json").write_text('{"format": 1, "pipel')
    shown = cli("ls", run_dir.parent)
    assert shown.code == 1
    assert str(run_dir.parent / "torn") in shown.err
    assert len(shown.out.splitlines()) == 2
    (run_dir.parent / "unreadable").mkdir()  # as of another user: a read of this file is an error, also for root
    (run_dir.parent / "unreadable" / "config.json").symlink_to("/proc/self/mem")
    shown = cli("ls", run_dir.parent)
    assert shown.code == 1
    assert str(run_dir.parent / "unreadable") in shown.err
    assert len(shown.out.splitlines()) == 2


def test_inspect_disagreement(cli: Cli, run_dir: Path, tmp_path: Path):
    """A reward function that says something else is exit code 1, with examples."""
    file = tmp_path / "other.py"
    file.write_text(
        "from rlhf_pipeline import CopyDigits, Pipeline, TinyPolicy\n\n"
        "def zero(prompt, completion, answer, meta):\n    return 0.0\n\n"
        "def other() -> Pipeline:\n"
        "    return Pipeline(name='o', policy=TinyPolicy(), prompts=CopyDigits(), reward=zero)\n"
    )
    shown = cli("inspect", run_dir, "--grade", "--definition", file)
    assert shown.code == 1
    assert "DISAGREES: " in shown.out
    assert "DISAGREES with metrics.jsonl: 6 of 6 rollouts" in shown.out
    assert "stored 0.2500, now 0.00" in shown.out


def test_inspect_without_definition(cli: Cli, run_dir: Path):
    """A definition that is gone costs the check and not the counts."""
    config = json.loads((run_dir / "config.json").read_text())
    config["definition"] = "gone_pipeline"
    (run_dir / "config.json").write_text(json.dumps(config))
    shown = cli("inspect", run_dir)
    assert shown.code == 0
    assert "trajectories  48" in shown.out
    shown = cli("inspect", run_dir, "--grade")
    assert shown.code == 2
    assert "there is no pipeline 'gone_pipeline'" in shown.err


def test_inspect_store_alone(cli: Cli, run_dir: Path):
    """A store alone can be counted, and graded with a definition."""
    (run_dir / "store").rename("alone")
    assert "inspect alone --grade --definition NAME" in cli("inspect", "alone").out
    assert "Add --definition" in cli("inspect", "alone", "--grade").err
    assert "agrees: 48 trajectories" in cli("inspect", "alone", "--grade", "--definition", "copy_digits").out


def test_inspect_executes_nothing_of_a_run_unasked(cli: Cli, run_dir: Path, tmp_path: Path):
    """Without --grade it says what it would call; with it, code of a run that was not started here needs --trust."""
    assert run_dir.is_dir()  # the current folder is a temporary one
    file = tmp_path / "judged.py"
    file.write_text(
        "from pathlib import Path\n\nfrom rlhf_pipeline import Learn, Pipeline, CopyDigits, TinyPolicy\n\n"
        f"Path({str(tmp_path / 'executed')!r}).touch()\n\n"
        "def judge(prompt, completion, answer, meta):\n    return float(len(completion))\n\n"
        "def judged() -> Pipeline:\n"
        "    return Pipeline(name='j', policy=TinyPolicy(), prompts=CopyDigits(), reward=judge, learn=Learn(steps=1))\n"
    )
    assert cli("run", file, "--out", "runs/judged").code == 0
    (tmp_path / "executed").unlink()
    shutil.move("runs/judged", "foreign")
    shown = cli("inspect", "foreign")
    assert shown.code == 0
    assert "`rlhf-pipeline inspect foreign --grade` calls definition_judged:judge on 256 trajectories" in shown.out
    refused = cli("inspect", "foreign", "--grade")
    assert (refused.code, "add --trust" in refused.err) == (2, True)
    assert not (tmp_path / "executed").exists()
    assert "agrees: 256 trajectories" in cli("inspect", "foreign", "--grade", "--trust").out
    assert (tmp_path / "executed").exists()


def test_show(cli: Cli, run_dir: Path):
    """One trajectory is shown whole, several as a table."""
    assert "trajectory 47: group 11, policy version 10" in cli("show", run_dir).out
    assert "trajectory 5: group 1" in cli("show", run_dir, "--id", 5).out
    group = cli("show", run_dir, "--group", 3).out.splitlines()
    assert [line.split()[:2] for line in group[1:-1]] == [[str(row), "3"] for row in range(12, 16)]
    assert len(cli("show", run_dir, "--last", 7).out.splitlines()) == 9
    step = cli("show", run_dir, "--step", 3).out.splitlines()
    assert [line.split()[0] for line in step[1:-1]] == [str(row) for row in range(8, 16)]
    assert cli("show", run_dir, "--last", 2, "--full").out.count("trajectory ") == 2
    [item] = json.loads(cli("show", run_dir, "--id", "0:5", "--json").out)
    assert (item["id"], item["group"], len(item["ids"])) == ("5", 1, item["num_tokens"])
    assert [row["id"] for row in json.loads(cli("show", run_dir, "--last", 2, "--json").out)] == ["46", "47"]
    assert "no trajectory 4294967301 in" in cli("show", run_dir, "--id", "1:5").err


def test_verify(cli: Cli, run_dir: Path):
    """A whole run is exit code 0; a flipped bit is 1, in words."""
    assert cli("verify", run_dir).code == 0
    assert cli("verify", run_dir / "store").code == 0
    chunk = next((run_dir / "store").rglob("input_ids/c/0"))
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    shown = cli("verify", run_dir)
    assert shown.code == 1
    assert "DAMAGED  store:" in shown.out
    assert "8 trajectories are corrupted (ids 0, 1, 2" in shown.out
    assert cli("verify", run_dir / "store").code == 1
    assert cli("verify", run_dir / "store", "--accept-loss", 40).code == 1  # its commit is whole
    accepted = cli("verify", run_dir / "store", "--accept-loss")
    assert "accepted the loss of 1 damaged commit" in accepted.out
    assert accepted.code == 0
    data[0] ^= 1
    chunk.write_bytes(data)
    assert cli("verify", run_dir).code == 0


def test_verify_damaged_store_metadata(cli: Cli, run_dir: Path):
    """A store that cannot even be opened is damage, not a slip; one good copy of its metadata is enough to open it."""
    (run_dir / "store" / "zarr.json").write_text("{")
    assert "zarr.json is damaged" in cli("verify", run_dir).out
    (run_dir / "store" / "catalog" / "zarr.json").write_text("{")
    shown = cli("verify", run_dir)
    assert shown.code == 1
    assert "DAMAGED  store:" in shown.out


def test_report(cli: Cli, run_dir: Path, tmp_path: Path):
    """The report is written again, beside the run or elsewhere."""
    assert cli("report", run_dir).out.split() == ["runs/demo/report.html"]
    assert cli("report", run_dir, "--out", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_new_model_checks_first(cli: Cli, tmp_path: Path):
    """A missing text file or a folder that is taken is said before torch is imported."""
    assert "there is no text file at nothing.txt" in cli("new-model", tmp_path / "m", "--text", "nothing.txt").err
    text = tmp_path / "text.txt"
    text.write_text("words")
    shown = cli("new-model", tmp_path, "--text", text)
    assert shown.code == 2
    assert "is not an empty folder" in shown.err


def test_doctor_folder(tmp_path: Path):
    """A run may begin in a local temporary folder, the self test of the store passes, and nothing is left."""
    assert all(ok for ok, _ in doctor._folder(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", [True, False])
def test_doctor_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool):
    """Where a lock keeps nobody out, or there are none, no run may begin, and doctor says what the run would say."""

    def flock(file: object, operation: int) -> None:
        if not there:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    assert next(text for ok, text in doctor._folder(tmp_path) if not ok).startswith(f"file locks in {tmp_path} are not")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_doctor_read_only_folder(tmp_path: Path):
    """A folder that cannot be written is said with what to do."""
    tmp_path.chmod(0o500)
    assert any("Choose a writable folder" in text for ok, text in doctor._folder(tmp_path) if not ok)


def test_closed_pipe(run_dir: Path):
    """A reader that leaves early (head) is no error on stderr."""
    root = Path(__file__).parents[3]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{root / 'storage'}"}
    line = f"{sys.executable} -m rlhf_pipeline.cli show {run_dir} --last 48 --full | head -1"
    shown = subprocess.run(line, shell=True, capture_output=True, text=True, env=env, check=False)
    assert shown.stdout.startswith("trajectory 0")
    assert shown.stderr == ""


def test_status(cli: Cli, run_dir: Path):
    """A run's state in lines and as JSON; an alarm is exit code 1; a store alone has no state."""
    shown = cli("status", run_dir)
    assert shown.code == 1
    assert shown.out.startswith(f"{run_dir}: stopped")
    assert "  step    12 of 300, reward " in shown.out
    assert f"rlhf-pipeline run --resume --out {run_dir}" in shown.out
    data = json.loads(cli("status", run_dir, "--json").out)
    assert (data["state"], data["stored"], len(data["alarms"])) == ("stopped", 48, 1)
    assert cli("status", run_dir / "store").code == 2
