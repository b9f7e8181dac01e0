"""Twenty steps with weights replaced while completions are being sampled, killed five times, with every engine.

The learner and the collector are processes forked from this one, which has imported everything. Every version of the
weights is kept as it is published, and in the end each stored token is scored with the version that its span names.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.gsm8k import gsm8k
from rlhf_pipeline import Pipeline
from rlhf_pipeline.config_text import override_all
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.folder import RunFolder
from tests.crash._soak_checks import Witness, check_run
from tests.processes import Child, Children
from tests.rlhf_pipeline.policies.engines.fake_vllm import FakeVLLM
from tests.rlhf_pipeline.policies.engines.real_vllm import serving
from tests.rlhf_pipeline.small import collect, learn
from trajectory_store import TrajectoryStore

pytestmark = [
    pytest.mark.crash,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of torch, as vLLM imports it
]

STEPS = 20
KILLS = (("collector",), ("learner",), ("collector", "learner"), ("collector",), ("learner", "collector"))
"""Who is killed each time."""
CLOSE = 1e-4


def wordy(prompt: str, completion: str, answer: str | None, meta: dict[str, object]) -> float:
    """A reward that differs between the completions of a model that knows nothing, so that its weights change."""
    return completion.count("e") / max(len(completion), 1)


def questions(path: Path) -> Path:
    """Questions in GSM8K's form."""
    rows = []
    for a in range(4, 24):
        for b in range(3, 7):
            text = f"Ada has {a} eggs and eats {b} of them every evening. How many evenings do they last her?"
            rows.append({"question": text, "answer": f"{a} / {b}, rounded up.\n#### {-(-a // b)}"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def definition(folder: Path, engine: str, tokens: int) -> Pipeline:
    """The definition gsm8k with a tiny model that learns fast."""
    settings = {
        "policy.path": str(folder / "model"),
        "prompts.path": str(folder / "train.jsonl"),
        "collect.prompts_per_rollout": "2",
        "collect.group_size": "4",
        "collect.max_new_tokens": str(tokens),
        "collect.temperature": "0.8",
        "collect.num_slots": "8",
        "collect.engine": engine,
        "collect.refresh_weights_every": "4",
        "buffer.max_staleness": "3",
        "learn.steps": str(STEPS),
        "learn.lr": "3e-3",
        "learn.warmup_steps": "0",
        "learn.checkpoint_every": "3",
    }
    return override_all(replace(gsm8k(), reward=wordy), list(settings.items()))


@contextmanager
def fake_server(folder: Path) -> Iterator[str]:
    """The address of a fake server, which takes 3 ms for a token."""

    def serve() -> None:
        fake = FakeVLLM(folder / "model", delay_s=0.003)
        sys.stdout.write(f"{fake.address}\n")
        fake.http.serve_forever()

    with Children(folder / "server") as children:
        server = children.fork(serve)
        server.until(lambda: "\n" in server.output())
        yield server.output().split()[0]


class Lives:
    """A learner and a collector, and what can be seen of their run from outside."""

    def __init__(self, pipeline: Pipeline, run_dir: Path, children: Children) -> None:
        self.pipeline = pipeline
        self.children = children
        self.run = RunFolder(run_dir)
        self.witness = Witness(run_dir, pipeline.collect.prompts_per_rollout)
        self.versions = run_dir.parent / "versions"
        self.versions.mkdir()
        self.processes: dict[str, Child] = {}

    def start(self) -> None:
        """Start whoever does not live."""
        acts = {
            "learner": lambda: learn(self.pipeline, run_dir=self.run.path),
            "collector": lambda: collect(self.pipeline, run_dir=self.run.path, name="collector-0"),
        }
        for role, act in acts.items():
            if role not in self.processes:
                self.processes[role] = self.children.fork(act, name=role)

    def kill(self, *roles: str) -> None:
        """Kill them with SIGKILL."""
        for role in roles:
            self.processes[role].send_signal(signal.SIGKILL)
        for role in roles:
            code = self.processes.pop(role).wait()
            assert code == -signal.SIGKILL, f"the {role} was gone before it was killed"

    def look_until(self, holds: Callable[[], bool], seconds: float = 180.0) -> None:
        """Keep every version that is published and note what is acknowledged, until something holds."""
        end, last = time.monotonic() + seconds, 0.0
        while not holds():
            self.keep_versions()
            if time.monotonic() - last > 0.3:
                self.witness.look()
                last = time.monotonic()
            for process in self.processes.values():
                assert process.poll() in (None, 0), process.output()[-3000:]
            assert time.monotonic() < end, f"it did not happen; {self.steps()} steps are in the ledger"
            time.sleep(0.005)
        self.keep_versions()
        self.witness.look()

    def keep_versions(self) -> None:
        """Link the files of published weights elsewhere: the run itself keeps three versions."""
        for folder in self.run.weights.glob("version-*-*"):
            kept = self.versions / folder.name
            if not kept.exists():
                kept.mkdir()
                for file in folder.iterdir():
                    os.link(file, kept / file.name)

    def steps(self) -> int:
        """Steps in the ledger."""
        file = self.run.ledger_file
        return file.read_bytes().count(b"\n") if file.is_file() else 0


def worst_gaps(lives: Lives) -> dict[str, float]:
    """Score every sampled token of the store again.

    Returns:
        The largest distance from the stored log-prob with the weights of the token's own span; the largest with those
        of the trajectory's oldest, over the tokens of other spans; how many trajectories have several spans.
    """
    folders = {int(path.name.split("-")[1]): path for path in lives.versions.iterdir()}
    assert len(folders) == len(list(lives.versions.iterdir())), "a step that was taken again had other weights"
    names = ["input_ids", "assistant_mask", "log_probs", "policy_version", "newest_policy_version", "version_spans"]
    with TrajectoryStore.open(lives.run.path / "store") as store:
        rows = store.read(store.ids(), names)
    count, width = len(rows["input_ids"]), max(map(len, rows["input_ids"]))
    tokens, stored = np.zeros((count, width), np.int64), np.zeros((count, width), np.float32)
    sampled, real = np.zeros((count, width), bool), np.zeros((count, width), bool)
    version_of = np.zeros((count, width), np.int64)
    for i, ids in enumerate(rows["input_ids"]):
        tokens[i, : len(ids)], real[i, : len(ids)] = ids, True
        sampled[i, : len(ids)] = rows["assistant_mask"][i]
        stored[i, : len(ids)] = rows["log_probs"][i]
        version_of[i] = rows["policy_version"][i]
        for place, version in rows["version_spans"][i].tolist():
            version_of[i, place:] = version
        mine = version_of[i][sampled[i]]
        assert mine.min() == rows["policy_version"][i]
        assert (-1 if mine.max() == mine.min() else mine.max()) == rows["newest_policy_version"][i]
    oldest = np.broadcast_to(rows["policy_version"][:, None], version_of.shape)
    several = rows["newest_policy_version"] >= 0
    gaps = {"own": 0.0, "oldest": 0.0, "several": float(several.sum()), "versions": float(len(folders))}
    for version in np.unique(version_of[sampled]).tolist():
        policy = TokenPolicy.from_pretrained(folders[version], dtype=torch.float32)
        own, first = sampled & (version_of == version), sampled & (oldest == version) & several[:, None]
        which = np.flatnonzero((own | first).any(1))
        arguments = [torch.from_numpy(array[which]) for array in (tokens, real, own | first)]
        with torch.no_grad():
            scored = policy.log_probs(*arguments, temperature=lives.pipeline.collect.temperature).numpy()
        gap = np.abs(scored - stored[which])
        gaps["own"] = max(gaps["own"], float(gap[own[which]].max(initial=0.0)))
        other = (first & ~own)[which]
        gaps["oldest"] = max(gaps["oldest"], float(gap[other].max(initial=0.0)))
    return gaps


@pytest.fixture(scope="module", params=["slots", "fake", "vllm", "server"])
def setting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, int]]:
    """A value of `collect.engine`, the folder with the model and the questions, and how long completions may be.

    At a server weights are looked for twice a second, and the real one samples fast.
    """
    folder = tmp_path_factory.mktemp("in-flight")
    text = questions(folder / "train.jsonl")
    new_model(folder / "model", text_file=text, vocab_size=512, hidden_size=64, num_layers=2, num_heads=2)
    with ExitStack() as stack:
        if request.param == "fake":
            yield stack.enter_context(fake_server(folder)), folder, 160
        elif request.param == "server":
            yield stack.enter_context(serving(folder / "model", folder / "server.txt", max_model_len=1024)), folder, 480
        elif request.param == "vllm" and find_spec("vllm") is None:
            pytest.skip("vLLM is not installed; docs/engines.md says how to run this with it")
        else:
            yield request.param, folder, 160


def test_killed_five_times_with_weights_replaced_in_flight(setting: tuple[str, Path, int], tmp_path: Path):
    """Nothing acknowledged is lost, every step is taken once, and each token has the log-prob of its own weights."""
    engine, folder, tokens = setting
    chance = random.Random(7)
    with Children(tmp_path / "processes") as children:
        lives = Lives(definition(folder, engine, tokens), tmp_path / "run", children)
        for number, roles in enumerate(KILLS):
            lives.start()
            steps = min(lives.steps() + 2, STEPS - 1) if number else 3
            lives.look_until(lambda steps=steps: lives.steps() >= steps)
            pause = time.monotonic() + chance.uniform(0.0, 0.4)
            lives.look_until(lambda pause=pause: time.monotonic() >= pause)
            lives.kill(*roles)
        lives.start()
        lives.look_until(lambda: all(process.poll() == 0 for process in lives.processes.values()))

    found = check_run(tmp_path / "run", lives.pipeline, lives.witness, goal=False)
    missed = [str(line) for line in found if line.met is False]
    assert not missed, "\n".join(missed)
    assert [row["step"] for row in lives.run.ledger] == list(range(1, STEPS + 1))
    on_policy = [row["sampler_gap"] for row in lives.run.metrics if row["staleness_max"] == 0 and "sampler_gap" in row]
    assert on_policy
    assert max(on_policy) < CLOSE
    log = tmp_path / "run" / "log.txt"
    assert not log.exists() or "sampled log-probs differ" not in log.read_text()
    gaps = worst_gaps(lives)
    logging.getLogger(__name__).info("%s: %s", engine, gaps)
    assert gaps["several"] >= 8
    assert gaps["own"] < CLOSE
    assert gaps["oldest"] > 100 * CLOSE, "the versions are too alike for a wrong span to be seen"
