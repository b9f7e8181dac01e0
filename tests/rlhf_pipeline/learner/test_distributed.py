from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from tensordict import lazy_stack

from rlhf_pipeline import GRPOLoss, Learn, MCAdvantage, TrajectoryReplayBuffer, scratch_policy
from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.learner.distributed import Shards, shard_policy
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.learner.optimizer import PolicyOptimizer
from rlhf_pipeline.learner.state import read_state
from rlhf_pipeline.report.check import check_run, check_store
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import StepRows
from tests.processes import Children
from tests.rlhf_pipeline.small import drawn_trajectory

PROGRAM = Path(__file__).with_name("sharded_program.py")
ROOT = Path(__file__).resolve().parents[3]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "storage")]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def store(tmp_path) -> Path:
    """Twelve trajectories of 3 to 9 tokens: with a budget of 9 tokens an odd number of micro-batches."""
    folder = tmp_path / "store"
    buffer = TrajectoryReplayBuffer(storage=folder, transform=MCAdvantage(4, estimator="dr_grpo"))
    rewards = [None] * 8 + [1.0] * 4  # the last group has no spread, so it has no gradient of its own
    buffer.extend(lazy_stack([drawn_trajectory(number, reward) for number, reward in enumerate(rewards)]))
    buffer.trajectories.close()
    return folder


def launch(
    store: Path,
    checkpoints: Path,
    first: int,
    last: int,
    *,
    processes: int,
    dtype: str,
    start: str = "-",
    loss: str = "plain",
):
    """Run the program in as many processes, as torchrun would start them, and return what the first one printed.

    Every process reads its own rows once: together all of the store in each step, and none of them twice.
    """
    arguments = [str(PROGRAM), str(store), str(checkpoints), str(first), str(last), dtype, start, loss]
    environments = group_of(processes) if processes > 1 else [{}]
    with tempfile.TemporaryDirectory() as folder, Children(Path(folder)) as children:
        ranks = [children.call(run_program, arguments, env=environment) for environment in environments]
        texts = [rank.succeed(500) for rank in ranks]
    for name in ("ledger.jsonl",):
        store.with_name(name).unlink(missing_ok=True)
    said = [json.loads(text.strip().splitlines()[-1]) for text in texts]
    for reads in zip(*(one["reads"] for one in said), strict=True):
        assert sorted(row for own in reads for row in own) == list(range(12)), "a row is not read once"
    return said[0]


def group_of(processes: int) -> list[dict[str, str]]:
    """What torchrun tells each process of a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def run_program(arguments: list[str]) -> None:
    """In a child that has imported everything: run a program."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def assert_same_curve(found: list[dict], expected: list[dict], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert one[name] == pytest.approx(value, rel=tolerance, abs=tolerance / 10), name


def assert_goes_on(store: Path, folder: Path, straight: dict, saved: dict, **options: Any) -> None:
    """Step 4 behind a saved step 3 is that of the straight run."""
    again = launch(store, folder, 4, 4, dtype="float32", start=saved["path"], **options)
    assert_same_curve(again["steps"], straight["steps"][3:], 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_learn_like_one(tmp_path, store):
    """The same losses, gradient norms and figures to 1e-5, and checkpoints that go from two to one and back."""
    straight = launch(store, tmp_path / "one", 1, 4, processes=1, dtype="float32")
    two = launch(store, tmp_path / "two", 1, 3, processes=2, dtype="float32")
    assert_same_curve(two["steps"], straight["steps"][:3], 1e-5)
    to_one = launch(store, tmp_path / "a", 4, 4, processes=1, dtype="float32", start=two["path"])
    half = str(tmp_path / "one" / "step-00000003")
    to_two = launch(store, tmp_path / "b", 4, 4, processes=2, dtype="float32", start=half)
    for found in (to_one, to_two):
        assert_same_curve(found["steps"], straight["steps"][3:], 1e-5)
    for name, total in straight["weights"].items():
        assert to_one["weights"][name] == pytest.approx(total, rel=1e-4, abs=1e-4)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["step-00000002", "step-00000003"]
    assert (Path(two["path"]) / "shards" / ".metadata").is_file()
    assert all(finding.ok for finding in check_store(store))
    shutil.rmtree(Path(two["path"]) / "shards")
    (Path(two["path"]) / "shards").mkdir()
    policy = scratch_policy("0123456789", hidden_size=16, num_layers=2, num_heads=2, seed=0)
    optimizer = PolicyOptimizer(policy.model, Learn())
    with pytest.raises(DataError, match=r"is damaged: its shards cannot be read"):
        read_state(Path(two["path"]), policy=policy, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_four_processes_learn_like_one(tmp_path, store):
    """The same losses to 1e-5, and a checkpoint of four goes on in one, two and four."""
    straight = launch(store, tmp_path / "one", 1, 4, processes=1, dtype="float32")
    four = launch(store, tmp_path / "four", 1, 3, processes=4, dtype="float32")
    assert_same_curve(four["steps"], straight["steps"][:3], 1e-5)
    for processes in (1, 2, 4):
        assert_goes_on(store, tmp_path / f"to-{processes}", straight, four, processes=processes)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_share_the_proximal_policy(tmp_path, store):
    """Corrected against the sampler: the curve of one process, and a checkpoint that goes on in either number."""
    straight = launch(store, tmp_path / "one", 1, 4, processes=1, dtype="float32", loss="corrected")
    two = launch(store, tmp_path / "two", 1, 3, processes=2, dtype="float32", loss="corrected")
    assert_same_curve(two["steps"], straight["steps"][:3], 1e-5)
    assert straight["steps"][2]["clip_fraction"] > 0
    for processes in (1, 2):
        assert_goes_on(store, tmp_path / f"again-{processes}", straight, two, processes=processes, loss="corrected")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_in_bfloat16_keep_float32_masters(tmp_path, store):
    """Layers are gathered in bfloat16 and stepped in float32: the curve of one process that keeps masters."""
    straight = launch(store, tmp_path / "one", 1, 4, processes=1, dtype="bfloat16")
    two = launch(store, tmp_path / "two", 1, 3, processes=2, dtype="bfloat16")
    assert_same_curve(two["steps"], straight["steps"][:3], 1e-3)
    to_one = launch(store, tmp_path / "a", 4, 4, processes=1, dtype="bfloat16", start=two["path"])
    assert_same_curve(to_one["steps"], straight["steps"][3:], 1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_program_of_the_page_runs_on_two_processes(tmp_path, store):
    """The Python block of docs/learner.md, as it stands, with a model and a store where it says they are."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "learner.md").read_text(), flags=re.DOTALL)
    (block,) = [block for block in blocks if "init_process_group" in block]
    (tmp_path / "program.py").write_text(block)
    scratch_policy("0123456789", hidden_size=16, num_layers=2, num_heads=2, seed=0).save_pretrained(tmp_path / "model")
    command = [*TORCHRUN, "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | PATHS, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"]
    assert (tmp_path / "checkpoints" / "step-00000002" / "shards" / ".metadata").is_file()
    assert [row["step"] for row in StepRows(tmp_path / "ledger.jsonl")] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_runs_on_two_processes_is_killed_and_resumes(tmp_path, children):
    """`torchrun ... -m rlhf_pipeline run` has the curve of one process; once torchrun is killed its processes save."""
    sizes = (
        "collect.group_size=4",
        "collect.prompts_per_rollout=4",
        "learn.token_budget=64",
        "learn.checkpoint_every=2",
        "learn.stop_at_reward=none",
    )
    options = ["copy_digits", *(word for size in sizes for word in ("--set", size))]
    assert main(["run", *options, "--steps", "4", "--out", str(tmp_path / "one")]) == 0
    command = [*TORCHRUN, "-m", "rlhf_pipeline", "run", "--out", "two"]
    run = RunFolder(tmp_path / "two")
    killed = children.program(*command, *options, "--steps", "100000", cwd=tmp_path, env=PATHS)
    killed.until(lambda: len(StepRows(run.metrics_file)) >= 4, every=0.1)
    ranks = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    assert len(ranks) == 2, killed.output()
    killed.kill()
    while any(is_running(rank) for rank in ranks):
        time.sleep(0.1)
    steps = len(StepRows(run.metrics_file))
    assert (run.checkpoints / f"step-{steps:08d}").is_dir(), killed.output()
    resumed = children.program(*command, "--resume", "--steps", str(steps + 1), cwd=tmp_path, env=PATHS)
    assert resumed.succeed(200).count("written:") == 1  # one process speaks
    one, two = (list(StepRows(tmp_path / name / "metrics.jsonl")) for name in ("one", "two"))
    names = ("loss", "grad_norm", "task_reward", "num_trajectories", "num_tokens")
    assert_same_curve(
        [{name: row[name] for name in names} for row in two[:4]], [{n: row[n] for n in names} for row in one], 1e-5
    )
    assert [row["step"] for row in StepRows(tmp_path / "two" / "ledger.jsonl")] == list(range(1, steps + 2))
    assert [finding.text for finding in check_run(RunFolder.open(tmp_path / "two")) if not finding.ok] == []
    assert {row["processes"] for row in two} == {2}
    assert main(["replay", str(tmp_path / "two"), "--from-step", str(steps + 1)]) == 0  # in one, up to rounding


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("setting", "said"),
    [("learn.logger=mlflow", "pip install mlflow"), ("prompts.num_digits=600", "model's context is 512")],
    ids=["before the models", "before the store"],
)
def test_a_start_that_fails_ends_all_processes(tmp_path, monkeypatch, children, setting, said):
    """The others wait for the first one's word, not for a process that is gone: its message is printed at once."""
    if importlib.util.find_spec("mlflow") and "mlflow" in said:
        pytest.skip("mlflow is installed")
    monkeypatch.chdir(tmp_path)
    words = ("run", "copy_digits", "--set", setting, "--out", "run")
    first, second = [children.run(*words, env=env) for env in group_of(2)]
    assert first.wait(200) == 2
    second.wait(200)
    assert said in first.output()
    assert not (tmp_path / "run").exists()


def is_running(pid: str) -> bool:
    """Return True while a process does something; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_shares_cover_every_micro_batch_once():
    """Any number of micro-batches on any number of processes: each is run once, and all run equally many.

    Some of them are run by who runs them when all are.
    """
    for processes in (1, 2, 3, 4):
        for batches in (1, 2, 3, 7):
            shares = []
            for rank in range(processes):
                shards = object.__new__(Shards)
                shards.rank, shards.world_size = rank, processes
                shares.append(shards.share(range(batches)))
                if batches > 2:
                    assert set(shards.share([0, 2])) - {None} == set(shares[-1]) & {0, 2}
            assert len({len(share) for share in shares}) == 1
            run = sorted(number for share in shares for number in share if number is not None)
            assert run == list(range(batches))


def test_what_does_not_go_with_shards_is_refused():
    """No process group, and options that need whole weights, each with what to do."""
    policy = scratch_policy("01", hidden_size=8, num_layers=1, num_heads=2, seed=0)
    with pytest.raises(DefinitionError, match="torchrun --nproc-per-node N"):
        shard_policy(policy)
    shards = object.__new__(Shards)
    shards.check(Learn())
    for options in ({"layout": "packed"}, {"offload_optimizer": True}, {"reference_every": 2}):
        with pytest.raises(DefinitionError, match="does not support several processes"):
            shards.check(Learn(**options))


@pytest.mark.parametrize("option", [{"top_entropy_quantile": 0.2}, {"clip_cov": 0.01}])
def test_a_choice_among_all_tokens_is_refused_with_several_processes(tmp_path, option):
    """No process sees all tokens of a step; the sentence names the settings."""
    policy = scratch_policy("01", hidden_size=8, num_layers=1, num_heads=2, seed=0)
    buffer = TrajectoryReplayBuffer(storage=tmp_path / "store", transform=MCAdvantage(2))
    with pytest.raises(DefinitionError, match=r"loss\.top_entropy_quantile and loss\.clip_cov"):
        Learner(
            policy=policy,
            loss=GRPOLoss(policy, **option),
            buffer=buffer,
            config=Learn(),
            max_staleness=0,
            max_completion_tokens=2,
            ledger=None,
            seed=0,
            shards=object.__new__(Shards),
        )
    buffer.trajectories.close()
