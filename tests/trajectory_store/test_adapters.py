"""What other trainers' hooks give becomes rows of a store; their own types are in tests/peers/test_beside.py."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trajectory_store import BatchError, SchemaError, TrajectoryStore
from trajectory_store.adapters import areal, nemo_gym, recorder_here, skyrl, slime, trl, verl
from trajectory_store.recorder import TrajectoryRecorder

from . import peers

NAN = math.nan


@pytest.fixture
def recorder(tmp_path: Path) -> Any:
    """A recorder into a new store."""
    with TrajectoryRecorder(tmp_path / "store") as made:
        yield made


def columns(recorder: TrajectoryRecorder) -> dict[str, Any]:
    """Return all columns of its store."""
    return recorder.store.read(recorder.store.ids())


def test_no_adapter_imports_a_trainer():
    """The modules are there beside any trainer, and without one."""
    code = "from trajectory_store.adapters import areal, nemo_gym, skyrl, slime, trl, verl"
    code += "; import sys; assert not {'torch', 'transformers', 'pydantic'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_slime(recorder: TrajectoryRecorder):
    """Groups, cut-off, aborted and removed samples, rewards by key, the oldest version of the weights."""
    done = peers.SlimeSample([1, 2, 3, 8, 4], 3, {"right": 0.5}, loss_mask=[1, 0, 1], rollout_log_probs=[-1, 0, -2])
    done.weight_versions = ["4", "3"]
    cut = peers.SlimeSample([1, 2, 5], 1, {"right": 0.0}, status=peers.Status.TRUNCATED, index=1)
    aborted = peers.SlimeSample([1, 2, 6], 1, None, group_index=1, status=peers.Status.ABORTED, index=2)
    removed = peers.SlimeSample([1, 2, 7], 1, {"right": 1.0}, group_index=1, index=3, remove_sample=True)
    args = SimpleNamespace(reward_key="right", rollout_temperature=0.5)
    slime.record(args, [[done, cut], [[aborted], [removed]]], recorder=recorder)
    found = columns(recorder)
    assert [ids.tolist() for ids in found["input_ids"]] == [[1, 2, 3, 8, 4], [1, 2, 5], [1, 2, 6], [1, 2, 7]]
    assert found["assistant_mask"][0].tolist() == [False, False, True, False, True]
    assert np.array_equal(found["log_probs"][0], np.array([NAN, NAN, -1, NAN, -2], np.float32), equal_nan=True)
    assert np.array_equal(found["task_reward"], [0.5, 0.0, NAN, 1.0], equal_nan=True)
    assert (found["finish_reason"], found["failure_reason"]) == (
        ["stop", "length", "abort", "stop"],
        ["", "", "engine", ""],
    )
    assert not found["assistant_mask"][3].any()
    assert found["policy_version"].tolist() == [3, -1, -1, -1]
    assert found["temperature"].tolist() == [0.5] * 4
    groups = found["group_id"].tolist()
    assert groups[0] == groups[1] != groups[2] == groups[3]


def test_skyrl(recorder: TrajectoryRecorder):
    """Rewards per token are summed; evaluations are marked; the generator is still itself."""
    output = {
        "prompt_token_ids": [[1, 2]] * 2,
        "response_ids": [[3], [4, 5]],
        "rewards": [[0.5], [0.0, 1.0]],
        "loss_masks": [[1], [1, 0]],
        "stop_reasons": ["stop", "length"],
        "rollout_logprobs": [[-0.5], [-1.0, -2.0]],
        "trajectory_ids": [peers.Identity("q", 0), peers.Identity("q", 1)],
    }
    wrapped = skyrl.RecordingGenerator(peers.Generator(output), recorder)
    assert wrapped.tokenizer == "mine"
    for phase in ("train", "eval"):
        batch = {"batch_metadata": peers.Metadata(7, phase), "sampling_params": {"temperature": 0.7}}
        assert asyncio.run(wrapped.generate(batch)) is output
    found = columns(recorder)
    assert found["task_reward"].tolist() == [0.5, 1.0] * 2
    assert found["evaluation"].tolist() == [False, False, True, True]
    assert found["policy_version"].tolist() == [7] * 4
    assert found["temperature"].tolist() == [np.float32(0.7)] * 4
    assert found["group_id"][0] == found["group_id"][1]
    assert found["assistant_mask"][1].tolist() == [False, False, True, False]


def test_verl(recorder: TrajectoryRecorder):
    """What is sampled and what is cleared are recorded, in the groups of their prompts."""
    queue = peers.Queue()
    buffer = verl.recording(peers.Buffer, queue, recorder)(queue)
    tag = {"status": "success", "min_global_steps": 3, "max_global_steps": 4}
    for key, reward in (("a_0_0", 1.0), ("a_1_0", 0.0), ("b_0_0", 0.5)):
        queue.rows[key] = peers.verl_row([1, 2], [3, int(reward * 2)], reward)
        buffer.partitions["train"][key] = tag
    buffer._clear_groups("train", {"b"})
    meta, _ = buffer.sample(5, "train", 1)
    assert meta.keys == ["a_0_0", "a_1_0"]
    found = columns(recorder)
    assert found["task_reward"].tolist() == [0.5, 1.0, 0.0]
    assert [json.loads(text)["prompt"]["cleared"] for text in found["meta"]] == [True, False, False]
    groups = found["group_id"].tolist()
    assert groups[0] != groups[1] == groups[2]
    assert found["policy_version"].tolist() == [3] * 3
    assert json.loads(found["meta"][0])["answer"] == "2"
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        verl.Other  # noqa: B018 - what verl looks up by name


def test_verl_is_served(tmp_path: Path, recorder: TrajectoryRecorder):
    """Whole groups of a store, in turn, as verl's agent loop would have put them."""
    rows = {"prompt_ids": [[1, 2]] * 3, "completion_ids": [[3], [4, 8, 5], [6]], "completions": [""] * 3}
    rows |= {"completion_masks": [[1], [1, 0, 1], [1]], "log_probs": [[-0.5], [-1.0, None, -2.0], [-1.0]]}
    recorder.record(**rows, groups=["a", "b", "a"], rewards=[1.0, 0.0, 0.5])
    queue = peers.Queue()
    buffer = verl.serving(peers.Buffer, queue, str(tmp_path / "store"), list)(queue)
    meta, _ = buffer.sample(7, "train", 1)
    assert meta.keys == ["stored-0_0_0", "stored-0_1_0"]
    assert [queue.rows[key]["responses"].tolist() for key in meta.keys] == [[3], [6]]
    meta, _ = buffer.sample(8, "train", 2)
    (of_b, *_) = (queue.rows[key] for key in meta.keys)
    assert of_b["responses"].tolist() == [4, 8, 5]
    assert of_b["response_mask"].tolist() == [1, 0, 1]
    assert of_b["rollout_log_probs"].tolist() == [-1.0, 0.0, -2.0]
    assert (of_b["rm_scores"].tolist(), of_b["uid"]) == ([0.0, 0.0, 0.0], "stored-1")
    assert {tag["min_global_steps"] for tag in meta.tags} == {8}
    assert buffer.sample(8, "val", 1)[0].keys == []


def test_areal(recorder: TrajectoryRecorder):
    """Padding is left out; the version of each token becomes spans; a rejected episode is nothing."""
    rows = [peers.episode([1, 2, 3, 8, 4], [0, 0, 1, 0, 1], [0, 0, -1, 0, -2], [-1, -1, 5, -1, 6], 1.0), None]
    wrapped = areal.RecordingWorkflow(peers.Workflow(rows), recorder, temperature=0.5)
    assert asyncio.run(wrapped.arun_episode(None, {"query_id": "q", "answer": "2"})) is not None
    assert asyncio.run(wrapped.arun_episode(None, {"query_id": "q"})) is None
    found = columns(recorder)
    assert [ids.tolist() for ids in found["input_ids"]] == [[1, 2, 3, 8, 4]]
    assert found["version_spans"][0].tolist() == [[2, 5], [4, 6]]
    assert (found["policy_version"].tolist(), found["newest_policy_version"].tolist()) == ([5], [6])
    assert np.array_equal(found["log_probs"][0], np.array([NAN, NAN, -1, NAN, -2], np.float32), equal_nan=True)


def test_calls_of_nemo_gym(tmp_path: Path):
    """A call is stored once, whoever stores it again; a recorder gives it its reward by its name."""
    one, other = (nemo_gym.StoreCapture(tmp_path / "store") for _ in range(2))
    entry = peers.Entry("r", "c", [1, 2], [3], [-0.5])
    for sink in (one, other, one):
        asyncio.run(sink.put(entry))
    with pytest.raises(ValueError, match="another payload"):
        asyncio.run(other.put(peers.Entry("r", "c", [1, 2], [4], [-0.5])))
    asyncio.run(one.begin_call("r", "d"))
    for sink in (one, other):
        asyncio.run(sink.close())
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        recorder.give_rewards({"r/c": 0.5})
        found = columns(recorder)
    assert found["capture_kind"] == ["put", "begin"]
    assert [ids.tolist() for ids in found["input_ids"]] == [[1, 2, 3], []]
    assert np.array_equal(found["task_reward"], [0.5, NAN], equal_nan=True)


def test_calls_of_nemo_gym_are_looked_at_once(tmp_path: Path):
    """What a call costs does not grow with the calls before, and two processes see each other's."""

    class Counted(set[int]):
        asked = 0

        def __contains__(self, row: object) -> bool:
            Counted.asked += 1
            return super().__contains__(row)

    one, other = (nemo_gym.StoreCapture(tmp_path / "store", durability="process") for _ in range(2))
    one._seen = Counted()
    for number in range(40):
        for sink, rollout in ((one, "r"), (other, "s")):
            asyncio.run(sink.put(peers.Entry(rollout, str(number), [1], [2], [-1.0])))
    assert Counted.asked <= 40 * 3
    for sink in (one, other):
        assert [len(sink._of(rollout)) for rollout in ("r", "s")] == [40, 40]
        asyncio.run(sink.close())


def test_the_queue_of_async_grpo(recorder: TrajectoryRecorder):
    """What the trainer takes is recorded with its group, version and advantage; its reward is not known."""
    inner: SimpleQueue[Any] = SimpleQueue()
    talk = [{"role": "user", "content": "1+1"}], [{"role": "assistant", "content": "2"}]
    ids, mask, scores = np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1]), np.array([0, 0, -0.5, -1.0], np.float32)
    for advantage in (0.5, -0.5):
        inner.put(peers.RolloutSample(*talk, ids, mask, scores, advantage, 3, 9, {"reward": 1.0}))
    queue = trl.RecordingQueue(inner, recorder, temperature=0.7)
    assert [queue.get(timeout=1).advantage for _ in range(queue.qsize())] == [0.5, -0.5]
    found = columns(recorder)
    assert (found["advantage"].tolist(), found["policy_version"].tolist()) == ([0.5, -0.5], [3, 3])
    assert (found["completion"], found["log_prob_mode"]) == (["2", "2"], ["processed"] * 2)
    assert found["group_id"][0] == found["group_id"][1]
    assert found["log_probs"][0][2:].tolist() == [-0.5, -1.0]


def test_stored_rows_are_served(tmp_path: Path, recorder: TrajectoryRecorder):
    """TRL's learner gets stored completions of its prompts in place of samples, with log-probs, masks and rewards."""
    rows = {"prompt_ids": [[1, 2]] * 3, "completion_ids": [[3], [4, 8, 5], [6]], "completions": [""] * 3}
    rows |= {"completion_masks": [[1], [1, 0, 1], [1]], "log_probs": [[-0.5], [-1.0, None, -2.0], [-1.0]]}
    recorder.record(**rows, prompts=["p"] * 3, rewards=[1.0, 0.0, None])
    serve = trl.stored_rollouts(tmp_path / "store")
    found = serve(["p", "p", "p"], None)
    assert found["completion_ids"] == [[3], [4, 8, 5], [3]]
    assert found["logprobs"][1] == [-1.0, 0.0, -2.0]
    assert found["env_mask"][1] == [1, 0, 1]
    assert trl.stored_reward(completions=[], stored_reward=found["stored_reward"]) == [1.0, 0.0, 1.0]
    with pytest.raises(BatchError, match="no rows of the prompt 'q' that may be learned from"):
        serve(["q"], None)


def test_hooks_find_their_store_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hook that a trainer imports by its name records into `TRAJECTORY_STORE`."""
    monkeypatch.delenv("TRAJECTORY_STORE", raising=False)
    with pytest.raises(SchemaError, match="set TRAJECTORY_STORE"):
        recorder_here()
    monkeypatch.setenv("TRAJECTORY_STORE", str(tmp_path / "store"))
    slime.record(SimpleNamespace(), [[peers.SlimeSample([1, 2], 1)]])
    assert recorder_here().num_recorded == 1
    recorder_here().close()
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert len(store) == 1
