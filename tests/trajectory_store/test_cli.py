"""The command `trajectory-store`, as it is typed."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import trajectory_store
from trajectory_store import Column, TrajectoryRecorder, TrajectoryStore
from trajectory_store.cli import EPILOG, main, parser

STORAGE = Path(trajectory_store.__file__).resolve().parents[1]
COLUMNS = [
    *(Column("tokens", "int32", ragged=True), Column("reward", "float32"), Column("text", "str", fill="")),
    Column("later", "int64", mutable=True),
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Six rows in six segments."""
    for n in range(6):
        mode = TrajectoryStore.open if n else TrajectoryStore.create
        with mode(tmp_path / "store", **({"mode": "a"} if n else {"schema": COLUMNS})) as made:
            made.append({"tokens": [[n] * n], "reward": [n / 4], "text": [f"row {n}\x1b[31m"]})
    return tmp_path / "store"


def test_each_command_ends_with_what_to_type_next(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What is printed is the result, safe for a terminal, and a line that works."""
    pytest.importorskip("pyarrow")
    typed = [
        (["stats", store], "6 trajectories, 4 columns"),
        (["show", store, "--where", "reward>=1", "--num", "1"], "1 of 2 trajectories"),
        (["verify", store], "all checksums match"),
        (["compact", store], "ids, order and values are unchanged"),
        (["copy", store, "--to", tmp_path / "some", "--where", "reward >= 0.5"], "4 trajectories"),
        (["export", store, "--to", tmp_path / "rows.parquet", "--columns", "reward,tokens"], "6 trajectories"),
    ]
    for words, said in typed:
        assert main([str(word) for word in words]) == 0
        shown = capsys.readouterr().out
        assert said in shown
        assert "\x1b" not in shown
        last = shown.splitlines()[-1].removeprefix("next:  trajectory-store ")
        assert main(shlex.split(last)) == 0
        capsys.readouterr()
    with TrajectoryStore.open(tmp_path / "some") as some:
        assert some["reward"].tolist() == [0.5, 0.75, 1.0, 1.25]
    with TrajectoryStore.from_parquet(tmp_path / "again", tmp_path / "rows.parquet") as again:
        assert [row["tokens"].tolist() for row in again] == [[n] * n for n in range(6)]


def test_show_and_stats_say_what_is_there(store: Path, capsys: pytest.CaptureFixture[str]):
    """Values of the newest rows, and figures of each column."""
    main(["show", str(store), "--num", "1", "--columns", "tokens,text"])
    shown = capsys.readouterr().out
    assert "  tokens: [5 5 5 5 5]" in shown
    assert "  text: 'row 5\\\\x1b[31m'" in shown or "row 5\\x1b[31m" in shown
    main(["stats", str(store)])
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["reward"] == ["reward", "float32", "6", "0", "0.625", "1.25"]
    assert lines["tokens"] == ["tokens", "int32[]", "6", "0", "long", "2.5", "long", "5", "long"]
    assert lines["later"][2] == "0"


def test_damage_is_exit_code_1_and_a_slip_2(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As of other commands that check files."""
    (file,) = (store / "seg-00000002" / "reward").rglob("0")
    raw = bytearray(file.read_bytes())
    raw[0] ^= 1
    file.write_bytes(raw)
    assert main(["verify", str(store)]) == 1
    shown = capsys.readouterr().out
    assert "1 trajectories damaged" in shown
    assert shown.splitlines()[-1] == f"next:  trajectory-store verify {store} --accept-loss"
    assert main(["stats", str(tmp_path / "none")]) == 2
    assert "there is no trajectory store at" in capsys.readouterr().err
    assert main(["show", str(store), "--where", "rewart > 0"]) == 2
    assert "Did you mean 'reward'" in capsys.readouterr().err


def test_the_suffix_names_the_format_and_a_file_is_replaced_on_request(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """JSON Lines and CSV have null or nothing where no value was supplied; other suffixes and folders are rejected."""
    to = [tmp_path / f"rows{suffix}" for suffix in (".jsonl", ".csv")]
    for file in to:
        assert main(["export", str(store), "--to", str(file), "--where", "reward<=0.25"]) == 0
    rows = [json.loads(line) for line in to[0].read_text().splitlines()]
    assert [(row["tokens"], row["reward"], row["later"]) for row in rows] == [([], 0.0, None), ([1], 0.25, None)]
    assert rows[1]["text"] == "row 1\x1b[31m"
    with to[1].open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [(row["tokens"], row["reward"], row["later"]) for row in cells] == [("[]", "0.0", ""), ("[1]", "0.25", "")]
    before = to[1].read_bytes()
    assert main(["export", str(store), "--to", str(to[1])]) == 2
    assert to[1].read_bytes() == before
    assert main(["export", str(store), "--to", str(to[1]), "--force", "--columns", "reward"]) == 0
    assert to[1].read_text().splitlines()[:2] == ["id,reward", "0,0.0"]
    capsys.readouterr()
    for wrong in (".", "rows", "rows.xlsx"):
        assert main(["export", str(store), "--to", wrong]) == 2
        assert "that ends with .parquet, .jsonl or .csv" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*.part"))


def test_version_and_json(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each command prints one JSON document; the version is that of the package."""
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"trajectory-store {trajectory_store.__version__}\n"
    typed = {
        "stats": [], "show": ["--num", "1"], "verify": [], "compact": [],
        "copy": ["--to", str(tmp_path / "copy")], "export": ["--to", str(tmp_path / "rows.csv")],
    }  # fmt: skip
    found: dict[str, dict[str, object]] = {}
    for command, words in typed.items():
        assert main([command, str(store), "--json", *words]) == 0
        found[command] = json.loads(capsys.readouterr().out)
    assert found["stats"]["columns"][1] == {  # type: ignore[index]
        "column": "reward", "type": "float32", "given": 6, "unit": "", "min": 0.0, "mean": 0.625, "max": 1.25,
    }  # fmt: skip
    assert found["show"]["rows"] == [{"id": 5 << 32, "tokens": [5] * 5, "reward": 1.25, "text": "row 5\x1b[31m"}]
    assert (found["verify"]["ok"], found["copy"]["trajectories"], found["export"]["trajectories"]) == (True, 6, 6)


def test_show_begins_with_text_reward_and_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Internal columns and those without a value are listed on request; figures count supplied values alone."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.record(
            prompts=["1+1="] * 2, prompt_ids=[[1], [1]], completions=["2", "3"], completion_ids=[[2], [3]],
            rewards=[1.0, None], policy_version=7,
        )  # fmt: skip
        assert "2 recorded" in repr(recorder)
        assert "<td>1+1=</td>" in recorder._repr_html_()
    assert main(["show", str(tmp_path / "store"), "--num", "1"]) == 0
    names = re.findall(r"^  (\w+):", capsys.readouterr().out, flags=re.MULTILINE)
    assert names[:4] == ["prompt", "completion", "task_reward", "group_id"]
    assert not {"slot", "waiting", "priority", "ref_log_probs", "advantage", "finish_reason"} & {*names}
    assert main(["show", str(tmp_path / "store"), "--num", "1", "--all"]) == 0
    listed = re.findall(r"^  (\w+):", capsys.readouterr().out, flags=re.MULTILINE)
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert {*listed} == {column.name for column in store.schema}
    main(["stats", str(tmp_path / "store"), "--json"])
    figures = {column["column"]: column for column in json.loads(capsys.readouterr().out)["columns"]}
    assert figures["priority"]["given"] == 0
    assert figures["priority"]["mean"] is None
    without = ("advantage", "temperature", "finish_reason", "failure_reason")  # NaN, or an empty text
    assert [figures[name]["given"] for name in ("task_reward", *without)] == [1, 0, 0, 0, 0]
    assert figures["policy_version"]["mean"] == 7


def test_errors_name_what_a_shell_can_do(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """No message of the command names a call from Python."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (file,) = (store / "seg-00000002" / "reward").rglob("0")
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    for words in (
        ["stats", tmp_path / "none"],
        ["stats", tmp_path / "folder"],
        ["copy", store, "--to", tmp_path / "folder", "--skip-damaged"],
        ["copy", store, "--to", tmp_path / "copy"],
        ["export", store, "--to", tmp_path / "rows.csv"],
        ["verify", store],
    ):
        assert main([str(word) for word in words]) in (1, 2)
        printed = "".join(capsys.readouterr())
        assert printed
        assert not re.search(r"TrajectoryStore\.|\w\(\)|=True", printed), printed


def test_a_shell_completes_commands_and_options(tmp_path: Path):
    """As `register-python-argcomplete` asks: by variables, answered in a file."""
    pytest.importorskip("argcomplete")
    answers: list[set[str]] = []
    for line in ("trajectory-store ex", "trajectory-store export s --fo"):
        asked = {
            "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answers"), "PYTHONPATH": str(STORAGE),
        }  # fmt: skip
        code = "import sys; sys.argv[0] = 'trajectory-store'; from trajectory_store.cli import main; main()"
        subprocess.run([sys.executable, "-c", code], env=os.environ | asked, check=True)
        answers.append({answer.strip() for answer in (tmp_path / "answers").read_text().split("\n")})
    assert answers == [{"export"}, {"--force"}]


def test_help_is_quick_and_its_examples_can_be_typed():
    """Help imports no NumPy; every printed example parses."""
    code = (
        "import sys; from trajectory_store.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
    )
    code += "print([m for m in ('numpy', 'asyncio', 'typing_extensions') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(STORAGE)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"
    examples = re.findall(r"^  trajectory-store (.*)$", EPILOG, flags=re.MULTILINE)
    assert {parser().parse_args(shlex.split(line)).command for line in examples} == {
        *("stats", "show", "verify", "copy", "export")
    }
    assert np.__name__ in sys.modules
