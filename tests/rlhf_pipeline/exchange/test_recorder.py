"""Recording from loops and from reward functions as TRL calls them."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.exchange import TrajectoryRecorder, import_files
from trajectory_store import BatchError, SchemaError, TrajectoryStore

from .conftest import Write


def rows_of(store: Path) -> dict[str, Any]:
    """Return all columns of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read(opened.ids())


def call(functions: list[Any], *, step: int = 0, prompts: list[Any] | None = None) -> list[list[float | None]]:
    """Call reward functions as TRL 1.16 does, for two prompts of two completions."""
    prompts = prompts or ["1+1=", "1+1=", "2+2=", "2+2="]
    completions = ["2", "3", "4", "5"]
    ids = [[ord(text), 1] for text in completions]
    columns = {"answer": ["2", "2", "4", "4"], "trainer_state": SimpleNamespace(global_step=step)}
    extra = {"log_extra": lambda *_: None, "log_metric": lambda *_: None}
    return [
        function(prompts=prompts, completions=completions, completion_ids=ids, **columns, **extra)
        for function in functions
    ]


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """A reward function as a user writes it."""
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def some_brief(completions: list[str], **columns: Any) -> list[float | None]:
    """A reward function that does not apply to the last completion."""
    return [0.5] * (len(completions) - 1) + [None]


def test_reward_functions_record(tmp_path: Path, tokenizer: Any):
    """The trainer gets the functions' own rewards; the store their weighted sum, the ids and the policy version."""
    with TrajectoryRecorder(tmp_path / "store", tokenizer=tokenizer, group_size=2) as recorder:
        functions = recorder.reward_funcs([right, some_brief], weights=[2.0, 1.0])
        assert [function.__name__ for function in functions] == ["right", "some_brief"]  # the names of TRL's metrics
        assert call(functions, step=7) == [[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, 0.5, None]]
        assert recorder.num_recorded == 4
        call(functions, step=8)
    rows = rows_of(tmp_path / "store")
    assert rows["input_ids"][0].tolist() == [*map(ord, "1+1=2"), 1]
    assert rows["assistant_mask"][0].tolist() == [False] * 4 + [True] * 2
    assert rows["task_reward"].tolist() == [2.5, 0.5, 2.5, 0.0] * 2
    assert rows["policy_version"].tolist() == [7] * 4 + [8] * 4
    assert rows["group_id"].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert rows["trajectory_id"].tolist() == list(range(8))
    assert np.isnan(rows["log_probs"][0]).all()
    meta = json.loads(rows["meta"][2])
    assert meta["answer"] == "4"
    assert meta["source"] == {"recorder": "reward function"}
    assert meta["encoded"] == {"tokenizer": "given", "prompt": "text"}


def test_one_function_and_a_completion_that_none_could_grade(tmp_path: Path, tokenizer: Any):
    """One function may be given as it is; None everywhere is a trajectory without a reward."""
    with TrajectoryRecorder(tmp_path / "store", tokenizer=tokenizer) as recorder:
        call(recorder.reward_funcs(some_brief))
    assert np.isnan(rows_of(tmp_path / "store")["task_reward"][3])
    assert rows_of(tmp_path / "store")["group_id"].tolist() == [0, 0, 2, 2]  # called after the group's first row


def test_async_functions_and_callable_objects(tmp_path: Path, tokenizer: Any):
    """Async functions stay async; an object with `__call__` keeps its class's name."""

    async def later(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    class Grader:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [2.0] * len(completions)

    with TrajectoryRecorder(tmp_path / "store", tokenizer=tokenizer) as recorder:
        functions = recorder.reward_funcs([Grader(), later])
        assert asyncio.iscoroutinefunction(functions[1])
        assert functions[0].__name__ == "Grader"
        columns = {"prompts": ["a"], "completions": ["b"], "completion_ids": [[5]]}
        assert functions[0](**columns) == [2.0]
        assert asyncio.run(functions[1](**columns)) == [1.0]
    assert rows_of(tmp_path / "store")["task_reward"].tolist() == [3.0]


def test_chat_prompts(tmp_path: Path, chat_tokenizer: Any):
    """Messages go through the chat template, a text prompt does not: as TRL itself encodes them."""
    with TrajectoryRecorder(tmp_path / "store", tokenizer=chat_tokenizer) as recorder:
        for prompt in ([{"role": "user", "content": "hi"}], "hi"):
            recorder.record(prompts=[prompt], completions=["b"], completion_ids=[[98, 1]], rewards=[0.0])
    rows = rows_of(tmp_path / "store")
    assert rows["input_ids"][0].tolist() == [*map(ord, "U:hiA:b"), 1]
    assert rows["input_ids"][1].tolist() == [*map(ord, "hib"), 1]


def test_a_batch_that_is_graded_by_half_is_not_recorded(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
):
    """Where a reward function fails, its batch is left out with a word in the log, and the next is whole."""
    with TrajectoryRecorder(tmp_path / "store", tokenizer=tokenizer, group_size=2) as recorder:
        functions = recorder.reward_funcs([right, some_brief])
        call(functions[:1], step=1)
        with caplog.at_level(logging.WARNING, logger="rlhf_pipeline"):
            call(functions, step=2)
        assert "grading of a batch did not finish" in caplog.text
    assert rows_of(tmp_path / "store")["policy_version"].tolist() == [2] * 4


def test_processes_and_restarts_never_share_ids(tmp_path: Path):
    """Two ranks split groups between them; a recorder on an old store continues with new ids."""
    batch = {"prompt_ids": [[1]] * 3, "completions": ["x"] * 3, "completion_ids": [[2]] * 3, "rewards": [0.0] * 3}
    for _ in range(2):
        ranks = [TrajectoryRecorder(tmp_path / "store", group_size=2, rank=rank, world_size=2) for rank in range(2)]
        for _ in range(2):
            for recorder in ranks:
                recorder.record(**batch)
        for recorder in ranks:
            recorder.close()
    rows = rows_of(tmp_path / "store")
    ids, groups = rows["trajectory_id"], rows["group_id"]
    assert sorted(ids.tolist()) == [*range(12), *((1 << 40) + i for i in range(12))]
    assert np.array_equal(groups, ids // 2 * 2)  # of 12 places, two and two


def test_ranks_that_are_known_late(tmp_path: Path):
    """Recorders that a trainer tells their ranks share the groups of a call, though one of them writes first."""
    ranks = [TrajectoryRecorder(tmp_path / "store", group_size=4, rank=0, world_size=1) for _ in range(2)]
    for rank, recorder in enumerate(ranks):
        recorder.rank, recorder.world_size = rank, 2  # as `attach` does
        recorder.record(prompt_ids=[[1]] * 2, completions=[""] * 2, completion_ids=[[2]] * 2, rewards=[0.0, 1.0])
        recorder.close()
    assert rows_of(tmp_path / "store")["group_id"].tolist() == [0] * 4


def test_errors_are_raised_or_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """What does not fit is refused; with `on_error="log"` the trainer goes on and the log says what was lost."""
    wrong: dict[str, Any] = {"prompts": ["a"], "completions": ["b"], "completion_ids": [[1, 2]], "rewards": [0.0]}
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        with pytest.raises(SchemaError, match=r"--tokenizer FOLDER"):
            recorder.record(**wrong)
        with pytest.raises(BatchError, match=r"reward must contain one value per completion: expected 1, got 2"):
            recorder.record(**wrong | {"rewards": [0.0, 1.0]})
        with pytest.raises(
            BatchError, match=r"log_probs must contain one value per completion token: expected 2, got 1"
        ):
            recorder.record(**wrong, prompt_ids=[[3]], log_probs=[[-1.0]])
        for name, values in (("rewards", [math.inf]), ("log_probs", [[0.5, -1.0]]), ("advantages", [-math.inf])):
            odd: dict[str, Any] = wrong | {"prompt_ids": [[3]], name: values}
            with pytest.raises(BatchError, match=r"field '\w+' must (be finite|contain log-probs)"):
                recorder.record(**odd)
        with pytest.raises(BatchError, match=r"field 'policy_version' must be a whole number, got float 1\.5"):
            recorder.record(**wrong | {"prompt_ids": [[3]], "policy_version": 1.5})  # it was stored as 1
        with pytest.raises(BatchError, match=r"prompts or prompt_ids is required"):
            recorder.record(completions=["b"], completion_ids=[[1]], rewards=[0.0])
        with pytest.raises(SchemaError, match=r"group_size is 0; it must be at least 1"):
            recorder.record(**wrong | {"prompt_ids": [[3]], "group_size": 0})  # a ZeroDivisionError ended the training
        with pytest.raises(SchemaError, match=r"one value per reward function: expected 1, got 2"):
            recorder.reward_funcs(right, weights=[1.0, 2.0])
        assert recorder.num_recorded == 0
        recorder.on_error = "log"
        assert recorder.record(**wrong).tolist() == []
        assert "1 completion was not recorded" in caplog.text
    with pytest.raises(SchemaError, match=r"group_size is 0"):
        TrajectoryRecorder(tmp_path / "store", group_size=0)


def test_reward_models_need_attach(tmp_path: Path):
    """A model among the reward functions is refused with the other way named."""
    torch = pytest.importorskip("torch")
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        with pytest.raises(SchemaError, match=r"Linear is a model, not a reward function.*attach"):
            recorder.reward_funcs([torch.nn.Linear(1, 1)])
        with pytest.raises(
            SchemaError, match=r"object lacks attributes of .*: _generate_and_score_completions.*reward_funcs="
        ):
            recorder.attach(object())


def trainer(mode: str, **settings: Any) -> Any:
    """Return an object with the names of TRL's trainer that are looked at, over a vLLM server."""
    info = {"model_config": {"logprobs_mode": mode}}
    client = SimpleNamespace(get_server_info=lambda: info)
    methods = ("_generate_and_score_completions", "_calculate_rewards", "_get_per_token_logps_and_entropies")
    return SimpleNamespace(
        **dict.fromkeys(methods, lambda *_: None),
        **{"state": None, "use_vllm": True, "vllm_mode": "server", "add_callback": lambda _: None} | settings,
        accelerator=SimpleNamespace(process_index=0, num_processes=1, is_main_process=True),
        vllm_generation=SimpleNamespace(vllm_client=client),
    )


def test_log_probs_of_another_distribution_are_not_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Neither a server's at temperature 1 for samples of another one, nor computed ones of truncated sampling."""
    pytest.importorskip("transformers")
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        for settings in ({"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.9}):
            with pytest.raises(SchemaError, match=r"reports raw_logprobs, .*--logprobs-mode processed_logp"):
                recorder.attach(trainer("raw_logprobs", **settings))
            recorder.attach(trainer("processed_logprobs", **settings))
        recorder.attach(trainer("raw_logprobs", temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0))
        assert not caplog.text
        recorder.attach(trainer("", use_vllm=False, top_k=50))
        assert "sampled with top_k=50 cannot be computed after sampling" in caplog.text


def test_an_import_beside_a_recorder_is_refused(tmp_path: Path, jsonl: Write):
    """A store that is being recorded into is not imported into, since both give out ids."""
    file = jsonl([{"prompt_ids": [1], "completion_ids": [2], "reward": 0}])
    with TrajectoryRecorder(tmp_path / "store"), pytest.raises(Exception, match=r"another import is writing"):
        import_files([file], tmp_path / "store")
    assert import_files([file], tmp_path / "store").num_imported == 1


def test_steps_that_a_resumed_training_takes_again(tmp_path: Path, tokenizer: Any):
    """They get the ids of the earlier rows, and a replay learns from the newest; other prompts get new ids."""
    from rlhf_pipeline.config import Replay
    from rlhf_pipeline.run.selection import Limits, choose

    prompts = [[f"{step}{text}" for text in "aabb"] for step in range(6)]

    def train(first: int, last: int, *, named: list[list[str]] = prompts) -> None:
        with TrajectoryRecorder(tmp_path / "store", tokenizer=tokenizer, group_size=2) as recorder:
            functions = recorder.reward_funcs([right])
            for step in range(first, last):
                call(functions, step=step, prompts=named[step])

    train(0, 4)  # killed here; its newest checkpoint is that of step 2
    train(2, 5)  # killed again
    train(4, 6)
    with TrajectoryStore.open(tmp_path / "store") as store:
        versions = store.read_scalars("policy_version").tolist()
        names, groups = store.read_scalars("trajectory_id").tolist(), store.read_scalars("group_id").tolist()
        rows = store.ids()
    assert versions == [version for version in [0, 1, 2, 3, 2, 3, 4, 4, 5] for _ in range(4)]
    assert names == [4 * version + i for version in [0, 1, 2, 3, 2, 3, 4, 4, 5] for i in range(4)]
    assert groups == [name // 2 * 2 for name in names]
    chosen = choose(Replay(stores=(str(tmp_path / "store"),)), Limits(vocabulary=200, positions=None))
    assert sorted(chosen.row.tolist()) == rows[[*range(8), *range(16, 24), *range(28, 36)]].tolist()
    assert chosen.sources[0].num_repeated == 12

    train(3, 5, named=[["other"] * 4] * 6)  # another training, which was not recorded from its start
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert (store.read_scalars("trajectory_id")[-8:] >= 1 << 40).all()
    train(0, 1)
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert (store.read_scalars("trajectory_id")[-4:] >= 2 << 40).all()
