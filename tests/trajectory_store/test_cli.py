"""The command `trajectory-store`, as it is typed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trajectory_store import Column, TrajectoryStore
from trajectory_store.cli import EPILOG, main, parser

STORAGE = Path(__file__).resolve().parents[2] / "storage"
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
        (["verify", store], "all checksums hold"),
        (["compact", store], "ids, order and values are as before"),
        (["copy", store, "--to", tmp_path / "some", "--where", "reward >= 0.5"], "4 trajectories"),
        (["export", store, "--to", tmp_path / "rows.parquet", "--columns", "reward,tokens"], "6 trajectories"),
    ]
    for words, said in typed:
        assert main([str(word) for word in words]) == 0
        shown = capsys.readouterr().out
        assert said in shown
        assert "\x1b" not in shown
        last = shown.splitlines()[-1].removeprefix("next:  ")
        if last.startswith("trajectory-store "):
            assert main(shlex.split(last)[1:]) == 0
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
