"""The command at its edges: closed and full outputs, a signal at the start, names that would drive a terminal."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.collectors.grading import Grader, check_all_failed
from rlhf_pipeline.data.prompts import Prompt
from rlhf_pipeline.errors import DataError, MissingPathError, RewardError
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.log_file import write_log
from rlhf_pipeline.user_code.arguments import Sampled, bind

from .conftest import Cli

ROOT = Path(__file__).parents[3]
ENV = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}"}
COMMAND = f"{sys.executable} -m rlhf_pipeline.cli"


def shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line."""
    return subprocess.run(
        line, shell=True, capture_output=True, text=True, env=ENV | env, cwd=cwd, check=False, errors="surrogateescape"
    )


@pytest.mark.parametrize(
    ("line", "code", "wanted"),
    [
        ("list >&-", 0, "rlhf-pipeline: standard output is closed, so nothing is printed\n"),
        ("list > /dev/full", 2, "rlhf-pipeline: writing to standard output failed: No space left on device.\n"),
        ("list > /dev/full 2>&-", 2, ""),
        ("--help > /dev/full", 2, "rlhf-pipeline: writing to standard output failed: No space left on device.\n"),
        ("nothing >&- 2>&-", 2, ""),
    ],
)
def test_standard_output_that_cannot_be_written(tmp_path: Path, line: str, code: int, wanted: str):
    """A closed or full standard output is one line on standard error, and never a traceback."""
    shown = shell(f"{COMMAND} {line}", tmp_path)
    assert (shown.returncode, shown.stderr) == (code, wanted)


def test_files_do_not_take_the_place_of_closed_streams(tmp_path: Path):
    """With all streams closed a command works, and what it prints goes into none of its files."""
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [1], "completion_ids": [2], "reward": 1}\n')
    assert shell(f"{COMMAND} import rows.jsonl --into store <&- >&- 2>&-", tmp_path).returncode == 0
    shown = shell(f"{COMMAND} verify store", tmp_path)
    assert shown.returncode == 0, shown.stdout


@pytest.mark.slow
def test_a_signal_in_the_first_moments(tmp_path: Path):
    """Ctrl-C while the command starts is one line and exit code 130, whenever it comes."""
    codes = set()
    for delay in range(15, 120, 7):
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_pipeline.cli", "list"], stdout=-1, stderr=-1, env=ENV, cwd=tmp_path
        )
        time.sleep(delay / 1000)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        if b"rlhf_pipeline" in err or process.returncode == 0:  # else Python itself was still starting
            assert b"Traceback" not in err, (delay, err.decode())
        codes.add(process.returncode)
    assert codes & {0, 130}


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_names_beyond_ascii(run_dir: Path, tmp_path: Path, encoding: str):
    """A folder with any name is looked at and written to, also where the terminal knows ASCII only."""
    folder = tmp_path / "r\u00fcn-\u6f22"
    run_dir.rename(folder)
    for line in ("show", "report", "inspect", "verify"):
        shown = shell(
            f"{COMMAND} {line} '{folder}'", tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING=encoding,
            PYTHONCOERCECLOCALE="0",
        )  # fmt: skip
        assert (shown.returncode, shown.stderr) == (0, "")


def test_names_that_a_library_cannot_take(run_dir: Path, tmp_path: Path):
    """Where Python reads names as ASCII, and pyarrow cannot have them, the way out is said in one line."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    line = f"{COMMAND} export {run_dir} --to r\u00fcn.parquet"
    shown = shell(line, tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert shown.returncode == 2
    assert shown.stderr.endswith("Enable UTF-8 mode: PYTHONUTF8=1 rlhf-pipeline ...\n")
    assert len(shown.stderr.splitlines()) == 1
    assert shell(line, tmp_path, LC_ALL="C", PYTHONUTF8="1").returncode == 0


def test_errors_of_files_are_one_line(cli: Cli, run_dir: Path, tmp_path: Path):
    """What the system refuses is said in one sentence with the path."""
    (run_dir / "report.html").mkdir()
    shown = cli("report", run_dir)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == (
        "rlhf-pipeline: runs/demo/report.html cannot be written: Is a directory. Choose another path: "
        "rlhf-pipeline report runs/demo --out FILE.html\n"
    )
    shown = cli("report", run_dir, "--out", "/proc/report.html")
    assert shown.code == 2
    assert len(shown.err.splitlines()) == 1
    assert cli("report", run_dir, "--out", tmp_path / "page.html").code == 0
    assert (tmp_path / "page.html").is_file()


def test_a_run_folder_that_cannot_be_is_reported_before_torch_is_imported(cli: Cli, run_dir: Path, tmp_path: Path):
    """Where the folder or its name cannot be used the true reason is said, and nothing is left behind."""
    file = tmp_path / "file"
    file.touch()
    for command in (
        ["run", "copy_digits", "--out"],
        ["collect", "copy_digits", "--run"],
        ["learn", "copy_digits", "--run"],
    ):
        shown = cli(*command, "/proc/x")
        assert shown.code == 2
        assert shown.err == (
            f"rlhf-pipeline: /proc/x cannot be created: /proc: No such file or directory. Choose a "
            f"writable folder: {command[-1]} OTHER_FOLDER\n"
        )
        assert "importing torch" not in shown.out
        assert "Not a directory" in cli(*command, file / "x").err
    assert cli("new-model", "/proc/x", "--text", file).code == 2
    line = f"{COMMAND} run copy_digits --out r\u00fcn"
    shown = shell(line, tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert shown.returncode == 2
    assert shown.stderr.endswith("cannot represent this name. Enable UTF-8 mode: PYTHONUTF8=1 rlhf-pipeline ...\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs"]


ESCAPE = "\x1b]0;owned\x07"


def test_nothing_that_is_named_drives_the_terminal(cli: Cli, run_dir: Path, tmp_path: Path):
    """Escape sequences in names of files and fields, and in what a reward function raises, are spelled out."""
    file = tmp_path / f"a{ESCAPE}.jsonl"
    row = '{"prompt_ids": [1], "completion_ids": [2], "reward": 1, "\\u001b[31mred": 2}\n'
    file.write_text(row)
    done = cli("import", file, "--into", tmp_path / "store")
    assert done.code == 0
    table = tmp_path / "t.jsonl"
    table.write_text('{"step": 1, "prompt": "a", "completion": "b", "\\u001b[31mred": 1, "advantage": 0}\n')
    asked = cli("import", table, "--into", tmp_path / "other", "--tokenizer", "none")
    gone = cli("show", f"runs/{ESCAPE}")
    for shown in (done, asked, gone):
        assert "\x1b" not in shown.out + shown.err
        assert "\x07" not in shown.out + shown.err
    assert "a\\x1b]0;owned\\x07.jsonl" in done.out

    def reward(*args: object) -> float:
        raise ValueError(ESCAPE)

    grader = Grader(bind(reward))
    grades = grader.grade([Sampled(prompt=Prompt(text="a"), completion="b")])
    with pytest.raises(RewardError) as caught:
        check_all_failed(grades, grader.rewards)
    assert "\\x1b]0;owned" in str(caught.value)
    with write_log(RunFolder(run_dir), tmp_path / "log.txt"):
        logging.getLogger("rlhf_pipeline").warning("%s", ESCAPE)
    assert "\x1b" not in (tmp_path / "log.txt").read_text()
    for error in (DataError(ESCAPE), MissingPathError(ESCAPE)):
        assert "\x1b" not in str(error)
    with (tmp_path / "out.txt").open("w+") as out:
        RunView(out, live=False).echo(ESCAPE)
        out.seek(0)
        assert "\x1b" not in out.read()
