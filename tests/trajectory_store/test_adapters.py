"""What other trainers' hooks give becomes rows of a store; their own types are in tests/peers/test_beside.py."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections import Counter
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


def test_areal_groups(recorder: TrajectoryRecorder):
    """AReaL takes the recorder for a workflow (T3); a group is what is asked for at once, whatever the data are."""
    made = [peers.episode([1, 2, i], [0, 0, 1], [0, 0, -1], [-1, -1, 5], 1.0) for i in range(12)]
    wrapped = areal.RecordingWorkflow(peers.Workflow(made), recorder)
    assert isinstance(wrapped, peers.RolloutWorkflow)
    assert issubclass(areal.RecordingWorkflow, peers.RolloutWorkflow)
    data = {"query_id": "q"}

    async def grouped() -> None:  # as `GroupedRolloutWorkflow` of areal/infra/remote_inf_engine.py does
        await asyncio.gather(*[wrapped.arun_episode(None, data) for _ in range(4)])

    async def epochs() -> None:
        await asyncio.gather(*(asyncio.create_task(grouped()) for _ in range(2)))
        await grouped()

    asyncio.run(epochs())
    assert sorted(Counter(columns(recorder)["group_id"].tolist()).values()) == [4, 4, 4]
    for _ in range(3):  # another workflow, at the address of the one before
        one = areal.RecordingWorkflow(peers.Workflow([peers.episode([1, 2], [0, 1], [0, -1], [-1, 5], 1.0)]), recorder)
        asyncio.run(one.arun_episode(None, data))
        del one
    assert sorted(Counter(columns(recorder)["group_id"].tolist()).values()) == [1, 1, 1, 4, 4, 4]
    with pytest.raises(SchemaError, match="has no arun_episode method"):
        areal.RecordingWorkflow(SimpleNamespace(run=None), recorder)


def test_groups_of_counters_do_not_merge(tmp_path: Path):
    """Trainers whose counters begin again, in a restart or in an evaluation, have groups of their own (T5)."""
    store = tmp_path / "store"
    for prompt in ([1, 2], [4, 5, 6]):
        with TrajectoryRecorder(store) as recorder:
            slime.record(SimpleNamespace(), [[peers.SlimeSample([*prompt, 9], 1)] * 2], recorder=recorder)
            for evaluation in (False, True):
                output = {"prompt_token_ids": [[*prompt, int(evaluation)]] * 2, "response_ids": [[3], [4]]}
                output |= {"rewards": [0.0, 1.0], "loss_masks": [[1]] * 2}
                output["trajectory_ids"] = [peers.Identity("0", i) for i in range(2)]
                batch = {"batch_metadata": peers.Metadata(5, "eval" if evaluation else "train")}
                asyncio.run(skyrl.RecordingGenerator(peers.Generator(output), recorder).generate(batch))
            inner: SimpleQueue[Any] = SimpleQueue()
            ids, mask = np.array([*prompt, 7]), np.array([0] * len(prompt) + [1])
            for _ in range(2):
                inner.put(peers.RolloutSample([], [], ids, mask, -1.0 * mask, 0.5, 0, 0, {"reward": 1.0}))
            queue = trl.RecordingQueue(inner, recorder)
            assert [queue.get().group_id for _ in range(2)] == [0, 0]
    with TrajectoryStore.open(store) as opened:
        rows = opened.read(opened.ids())
    prompts: dict[int, set[Any]] = {}
    for i, group in enumerate(rows["group_id"].tolist()):
        prompt = tuple(rows["input_ids"][i][: rows["num_prompt_tokens"][i]].tolist())
        prompts.setdefault(group, set()).add((prompt, json.loads(rows["meta"][i])["source"]["recorder"]))
    assert [len(members) for members in prompts.values()] == [1] * 8
    assert set(Counter(rows["group_id"].tolist()).values()) == {2}


def test_rows_of_one_session_are_one_episode(tmp_path: Path):
    """Steps of SkyRL, outputs of verl, split rollouts of slime, interactions of an agent in AReaL (T6)."""

    class Interaction:
        def __init__(self, ids: list[int], reward: float) -> None:
            self.row = peers.episode(ids, [0, 1], [0, -1], [-1, 5], reward)

        def to_tensor_dict(self) -> Any:
            return self.row

    def by_skyrl(recorder: TrajectoryRecorder) -> None:
        output = {"prompt_token_ids": [[1], [1, 2, 3], [1], [1, 4, 5]], "response_ids": [[2], [6], [4], [7]]}
        output |= {"rewards": [0.25, 1.0, 0.0, 0.0], "loss_masks": [[1]] * 4, "is_last_step": [False, True] * 2}
        output["trajectory_ids"] = [peers.Identity("q", i // 2) for i in range(4)]
        batch = {"batch_metadata": peers.Metadata(1)}
        asyncio.run(skyrl.RecordingGenerator(peers.Generator(output), recorder).generate(batch))

    def by_verl(recorder: TrajectoryRecorder) -> None:
        queue = peers.Queue()
        buffer = verl.recording(peers.Buffer, queue, recorder)(queue)
        for key in ("u_0_1", "u_1_0", "u_0_0", "u_1_1"):  # verl writes sessions as they end
            queue.rows[key] = peers.verl_row([1], [2, int(key[-1])], 1.0 if key[2] == "0" else 0.0)
            buffer.partitions["train"][key] = {"status": "success"}
        buffer.sample(1, "train", 1)

    def by_slime(recorder: TrajectoryRecorder) -> None:
        rows = [peers.SlimeSample([1, i], 1, float(i < 2), index=i, rollout_id=i // 2) for i in range(4)]
        slime.record(SimpleNamespace(), [[rows[0], rows[2], rows[1], rows[3]]], recorder=recorder)

    def by_slime_in_lists(recorder: TrajectoryRecorder) -> None:
        rows = [peers.SlimeSample([1, i], 1, float(i < 2), index=i) for i in range(4)]
        slime.record(SimpleNamespace(), [[rows[:2], rows[2:]]], recorder=recorder)

    def by_areal(recorder: TrajectoryRecorder) -> None:
        sessions = [{str(i): Interaction([1, i], reward) for i in range(2)} for reward in (1.0, 0.0)]
        wrapped = areal.RecordingWorkflow(peers.Workflow(sessions), recorder)

        data: dict[str, Any] = {}

        async def grouped() -> None:
            await asyncio.gather(*[wrapped.arun_episode(None, data) for _ in range(2)])

        asyncio.run(grouped())

    for record in (by_skyrl, by_verl, by_slime, by_slime_in_lists, by_areal):
        with TrajectoryRecorder(tmp_path / record.__name__) as recorder:
            record(recorder)
            found = columns(recorder)
        assert found["episode_size"].tolist() == [2] * 4, record.__name__
        assert found["episode_row"].tolist() == [0, 1] * 2
        assert len(set(found["episode_id"].tolist())) == 2
        assert len(set(found["group_id"].tolist())) == 1
        rewards = found["task_reward"].tolist()
        assert np.isnan([rewards[0], rewards[2]]).all()
        assert sorted([rewards[1], rewards[3]]) == [0.0, 1.0]


def test_a_version_that_is_no_number_is_unknown(recorder: TrajectoryRecorder):
    """SGLang's weights are "default" until slime updates them for the first time (T8)."""
    sample = peers.SlimeSample([1, 2], 1, weight_versions=["default", "1"])
    slime.record(SimpleNamespace(), [[sample]], recorder=recorder)
    assert columns(recorder)["policy_version"].tolist() == [-1]


def test_rewards_beside_the_score_of_verl(recorder: TrajectoryRecorder):
    """Numbers are named rewards, also where rows have other names, and everything stays in `meta` (verl#7588)."""
    queue = peers.Queue()
    buffer = verl.recording(peers.Buffer, queue, recorder)(queue)
    for key, more in (("a_0_0", {"acc": True, "pred": "2"}), ("a_1_0", {"format/x": 0.5, "trusted": 1.0})):
        queue.rows[key] = peers.verl_row([1], [2], 1.0) | {"extra_fields": {"reward_extra_info": more}, "num_turns": 4}
        buffer.partitions["train"][key] = {"status": "success"}
    buffer.sample(1, "train", 1)
    found = columns(recorder)
    assert np.array_equal(found["reward_acc"], [1.0, NAN], equal_nan=True)
    assert np.array_equal(found["reward_format_x"], [NAN, 0.5], equal_nan=True)
    assert np.array_equal(found["reward_trusted_"], [NAN, 1.0], equal_nan=True)
    assert found["reward_trusted"].tolist() == [True, True]
    about = [json.loads(meta)["prompt"] for meta in found["meta"]]
    assert [item["num_turns"] for item in about] == [4, 4]
    assert about[0]["reward_extra_info"] == {"acc": True, "pred": "2"}


def test_episodes_are_served_as_sessions_of_verl(tmp_path: Path, recorder: TrajectoryRecorder):
    """Each output has the reward of its session, and all fields that verl's metrics read (T4)."""
    rows = {"prompt_ids": [[1], [1, 2], [1]], "completion_ids": [[3], [4], [5]], "completions": [""] * 3}
    recorder.record(**rows, rewards=[None, 1.0, 0.0], groups=["q"] * 3, episodes=["a", "a", None])
    queue = peers.Queue()
    meta, _ = verl.serving(peers.Buffer, queue, str(tmp_path / "store"), list)(queue).sample(7, "train", 1)
    assert meta.keys == ["stored-0_0_0", "stored-0_0_1", "stored-0_1_0"]
    assert [queue.rows[key]["rm_scores"].tolist() for key in meta.keys] == [[1.0], [1.0], [0.0]]
    written = {"num_turns", "metrics", "extra_fields", "prompts", "responses", "response_mask", "rollout_log_probs"}
    written |= {"rm_scores", "loss_mask", "input_ids", "position_ids", "multi_modal_inputs", "uid", "reward_model"}
    assert written <= queue.rows[meta.keys[0]].keys()


def test_calls_of_nemo_gym(tmp_path: Path):
    """A call is stored once, whoever stores it again; a recorder gives it its reward by its name."""
    one, other = (nemo_gym.StoreCapture(tmp_path / "store") for _ in range(2))
    entry = peers.Entry("r", "c", [1, 2], [3], [-0.5])
    for sink in (one, other, one):
        asyncio.run(sink.put(entry))
    with pytest.raises(ValueError, match="a different payload"):
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
    one._read_rows = Counted()
    for number in range(40):
        for sink, rollout in ((one, "r"), (other, "s")):
            asyncio.run(sink.put(peers.Entry(rollout, str(number), [1], [2], [-1.0])))
    assert Counted.asked <= 40 * 3
    for sink in (one, other):
        assert [len(sink._of(rollout)) for rollout in ("r", "s")] == [40, 40]
        asyncio.run(sink.close())


def test_the_queue_of_async_grpo(recorder: TrajectoryRecorder):
    """What the trainer takes is recorded with its group, version, advantage and rewards (T8)."""
    inner: SimpleQueue[Any] = SimpleQueue()
    talk = [{"role": "user", "content": "1+1"}], [{"role": "assistant", "content": "2"}]
    ids, mask, scores = np.array([1, 2, 3, 4]), np.array([0, 0, 1, 1]), np.array([0, 0, -0.5, -1.0], np.float32)
    for advantage, reward in ((0.5, 1.0), (-0.5, NAN)):
        metrics = {"reward": reward, "reward_std": NAN, "rewards/right": reward, "rewards/<lambda>": 0.0}
        inner.put(peers.RolloutSample(*talk, ids, mask, scores, advantage, 3, 9, metrics))
    queue = trl.RecordingQueue(inner, recorder, temperature=0.7)
    assert [queue.get(timeout=1).advantage for _ in range(queue.qsize())] == [0.5, -0.5]
    found = columns(recorder)
    assert (found["advantage"].tolist(), found["policy_version"].tolist()) == ([0.5, -0.5], [3, 3])
    assert np.array_equal(found["task_reward"], [1.0, NAN], equal_nan=True)
    assert np.array_equal(found["reward_right"], [1.0, NAN], equal_nan=True)
    assert found["reward__lambda_"].tolist() == [0.0, 0.0]
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
    with pytest.raises(BatchError, match=r"for the prompt 'q', .* has no rows that may be used for training"):
        serve(["q"], None)
    recorder.record(**rows, prompts=["q"] * 3, rewards=[None, 1.0, 0.5], groups=["q"] * 3, episodes=["a", "a", None])
    assert trl.stored_rollouts(tmp_path / "store")(["q"] * 2, None)["completion_ids"] == [[6], [6]]


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
