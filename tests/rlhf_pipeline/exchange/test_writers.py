"""What the current writers write beside plain successes: failures, evaluations, limits, rows that are not whole."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.cli import main
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import follow_folder, import_files
from trajectory_store import TrajectoryStore

from .conftest import Write

DATA = Path(__file__).parent / "data"
NAN = math.nan


def columns(store: Path, *names: str) -> list[tuple[Any, ...]]:
    """Return the rows of a store as tuples of the named columns."""
    with TrajectoryStore.open(store) as opened:
        found = opened.read(opened.ids(), names)
    return list(
        zip(
            *(found[name].tolist() if isinstance(found[name], np.ndarray) else found[name] for name in names),
            strict=True,
        )
    )


# -- tinker ------------------------------------------------------------------------------------------------------------


def call(split: str | None, group: int, traj: int, tokens: list[int] | None, **more: Any) -> dict[str, Any]:
    """Return a row as `_make_sample_wrapper` makes it: without `samples` where the call did not end well."""
    scope = {"run_id": "r", "iteration": 4, "group_idx": group, "traj_idx": traj}
    scope |= {} if split is None else {"split": split}
    row = {"kind": "sample", "scope": scope, "created_at": 12.5, "num_samples": 1, "seq_id": 7, "latency_sec": 0.1}
    row |= {"prompt_tokens": [1, 2], "prompt_length": 2, "sampling_params": {"temperature": 0.5}}
    if tokens is None:
        return row | {"status": "cancelled"} | more
    sample = {"tokens": tokens, "logprobs": [-0.5] * len(tokens), "stop_reason": "length"}
    return row | {"samples": [sample], "status": "ok"} | more


def summary(split: str, group: int, traj: int, reward: float, step: int | None) -> dict[str, Any]:
    """Return a row as `serialize_rollout_summaries` makes it."""
    where = {"split": split, "iteration": 4, "group_idx": group, "traj_idx": traj}
    return where | {"schema_version": 1, "sampling_client_step": step, "total_reward": reward, "steps": []}


def test_calls_of_tinker_that_failed_are_left_out(tmp_path: Path, jsonl: Write):
    """Also where a file begins with one: nobody sampled anything. The version is that of the sampling client."""
    failed = call("train", 0, 2, None, status="error", error="APIError()")
    rows = [failed, call("train", 0, 0, [3]), call("train", 0, 3, None), call("train", 0, 1, [4, 5])]
    rows.append(call("train", 0, 4, None, status="submitted"))
    rewards = [summary("train", 0, 0, 1.0, 3), summary("train", 0, 1, 0.0, None)]
    files = [jsonl(rows, "capture/sample.jsonl"), jsonl(rewards, "train_rollout_summaries.jsonl")]
    report = import_files(files, tmp_path / "store")
    assert (report.files[0].format, report.num_imported, report.files[0].num_left_out) == ("tinker", 2, 3)
    found = columns(tmp_path / "store", "task_reward", "policy_version", "finish_reason", "temperature")
    assert found == [(1.0, 3, "length", 0.5), (0.0, 4, "length", 0.5)]
    image = {key: value for key, value in rows[1].items() if key != "prompt_tokens"}
    file = jsonl([image, rows[1]], "images/sample.jsonl")
    with pytest.raises(DataError, match=r"sample\.jsonl:1: there are no prompt_tokens: the prompt contains images"):
        import_files([file], tmp_path / "images")


def test_other_splits_of_tinker_are_evaluations(tmp_path: Path, jsonl: Write):
    """Each its own rewards; one sample of a prompt is no group of one that should be mended."""
    rows = [call("train", 0, 0, [3]), call("train", 0, 1, [4]), call("eval/gsm8k", 0, 0, [5]), call("test", 1, 0, [6])]
    rows.append(call(None, 2, 0, [7]))
    rows[-1]["scope"]["purpose"] = "eval"
    rewards = [summary(*key, 4) for key in (("train", 0, 0, 1.0), ("train", 0, 1, 0.0), ("eval/gsm8k", 0, 0, 0.25))]
    report = import_files([jsonl(rows, "sample.jsonl"), jsonl(rewards, "all_rollout_summaries.jsonl")], tmp_path / "s")
    assert columns(tmp_path / "s", "evaluation") == [(False,), (False,), (True,), (True,), (True,)]
    assert [reward for (reward,) in columns(tmp_path / "s", "task_reward")][:3] == [1.0, 0.0, 0.25]
    assert (report.num_evaluations, report.num_groups, report.num_groups_with_spread) == (3, 1, 1)


# -- verl --------------------------------------------------------------------------------------------------------------


def generation(output: str, score: float, **more: Any) -> dict[str, Any]:
    """Return a row as `_write_generations` writes it."""
    return {"input": "1+1", "output": output, "gts": "2", "score": score, "step": 5, **more}


@pytest.mark.parametrize("trainer", ["ray", "v1"])
def test_validations_of_verl_are_evaluations(tmp_path: Path, jsonl: Write, tokenizer: Any, trainer: str):
    """Their writer always adds `reward`, which nothing overwrites; they are of the weights after their step."""
    ids = [{"uid": f"a_{i}_0"} if trainer == "v1" else {} for i in range(2)]
    rows = [generation("2", 1.0, reward=0.75, acc=True, overlong_reward=-0.25, **ids[0])]
    rows.append(generation("3", 0.0, reward=0.0, acc=False, overlong_reward=0.0, **ids[1]))
    trained = [generation("2", 1.0, **({"uid": "b_0_0"} if trainer == "v1" else {"request_id": "q", "reward": 9.0}))]
    trained.append(trained[0] | {"output": "3", "score": 0.0} | ({"uid": "b_1_0"} if trainer == "v1" else {}))
    files = [jsonl(rows, "validation/5.jsonl"), jsonl(trained, "rollouts/5.jsonl")]
    report = import_files(files, tmp_path / "store", tokenizer=tokenizer, one_turn=True)
    assert report.num_evaluations == 2
    found = columns(tmp_path / "store", "task_reward", "policy_version", "evaluation")
    assert found == [(0.75, 5, True), (0.0, 5, True), (1.0, 4, False), (0.0, 4, False)]


def test_a_trainer_of_verl_that_is_followed(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Its folders of rollouts and of validations are followed together, and each validation is marked."""
    jsonl([generation("2", 1.0, step=1), generation("3", 0.0, step=1)], "out/rollouts/1.jsonl")
    jsonl([generation("2", 1.0, reward=1.0, step=1)], "out/validation/1.jsonl")
    rounds = iter([False, True])

    def stop() -> bool:
        if ended := next(rounds):
            return ended
        jsonl([generation("2", 0.5, step=2), generation("3", 0.0, step=2)], "out/rollouts/2.jsonl")
        jsonl([generation("3", 0.0, reward=0.0, step=2)], "out/validation/2.jsonl")
        return ended

    options = {"tokenizer": tokenizer, "one_turn": True, "wait": lambda seconds: None}
    assert follow_folder(tmp_path / "out", tmp_path / "store", stop=stop, **options) == 6
    found = columns(tmp_path / "store", "policy_version", "evaluation")
    assert sorted(found) == [(0, False), (0, False), (1, False), (1, False), (1, True), (2, True)]


def test_a_validation_before_the_first_step_of_verl(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """It is step 0, of weights that nobody trained, and often one sample for each prompt."""
    rows = [generation("2", 1.0, reward=1.0, step=0), generation("3", 0.0, reward=0.0, step=0) | {"input": "2+2"}]
    import_files([jsonl(rows, "0.jsonl")], tmp_path / "store", tokenizer=tokenizer, one_turn=True)
    assert columns(tmp_path / "store", "policy_version", "evaluation") == [(0, True), (0, True)]


def test_a_training_whose_reward_function_gives_a_reward(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Its rows look like a validation's; who knows better says so."""
    file = jsonl([generation("2", 1.0, reward=1.0), generation("3", 0.0, reward=0.0)], "5.jsonl")
    fields = {"evaluation": "none"}
    report = import_files([file], tmp_path / "store", tokenizer=tokenizer, one_turn=True, fields=fields)
    assert (report.num_evaluations, report.num_groups_with_spread) == (0, 1)


def test_several_outputs_of_a_session_of_verl_are_refused(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Only the last of a session is compared with others', which rows of one group do not say."""
    rows = [generation("2", 1.0, uid="a_0_0"), generation("3", 1.0, uid="a_0_1") | {"input": "1+1 and 2"}]
    with pytest.raises(DataError, match=r"5\.jsonl:2: the group of this trajectory has members with other prompts"):
        import_files([jsonl(rows, "5.jsonl")], tmp_path / "store", tokenizer=tokenizer, one_turn=True)


# -- verifiers and prime-rl, slime -------------------------------------------------------------------------------------


def episodes(file: str = "prime_rl/rollouts/step_9/train/all/traces.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


def test_a_stage_that_timed_out_has_no_trusted_reward(tmp_path: Path, jsonl: Write):
    """Verifiers goes on to grade what was reached, says `ok`, and after `scoring_timeout` has not all rewards."""
    row = episodes()[0]
    rows = [row]
    for stage in ("agent", "finalize", "scoring"):
        rows.append(copy.deepcopy(row))
        rows[-1]["traces"][0] |= {"id": stage, "is_timeout": True, "stop_condition": f"{stage}_timeout"}
    import_files([jsonl(rows, "traces.jsonl")], tmp_path / "store")
    found = columns(tmp_path / "store", "failure_reason", "reward_trusted")
    assert found == [("", True), *[("timeout", False)] * 3]


@pytest.mark.parametrize("limit", ["context_length", "compaction_failed", "max_output_tokens", "max_turns"])
def test_limits_of_a_trace_cut_it_off(tmp_path: Path, jsonl: Write, limit: str):
    """What `Trace.is_truncated` counts, of the released version and of the newest source."""
    rows = [episodes()[0], episodes()[0]]
    rows[1]["traces"][0] |= {"id": "other", "stop_condition": limit}
    import_files([jsonl(rows, "traces.jsonl")], tmp_path / "store")
    assert columns(tmp_path / "store", "finish_reason") == [("stop",), ("turns" if limit == "max_turns" else "length",)]


def test_results_of_verifiers_without_a_completion(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """Before 0.4: a prompt that was too long has an empty list and counts; what failed has none, maybe no prompt."""
    row = {"example_id": 0, "prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "is_truncated": False}
    rows = [row | {"completion": [{"role": "assistant", "content": "4"}], "reward": 1.0}]
    rows.append(row | {"completion": [], "reward": 0.0, "is_truncated": True, "stop_condition": "prompt_too_long"})
    failed = {"completion": None, "reward": 0.0, "error": {"error": "ModelError"}, "stop_condition": "has_error"}
    rows += [row | failed, row | failed | {"prompt": None}]
    for name, written in (("as_written", rows), ("backwards", rows[::-1])):
        file = jsonl(written, f"{name}.jsonl")
        report = import_files([file], tmp_path / name, tokenizer=chat_tokenizer)
        assert (report.num_imported, report.files[0].num_left_out, report.num_groups) == (3, 1, 1)
        found = sorted(columns(tmp_path / name, "failure_reason", "finish_reason", "reward_trusted"))
        assert found == [("", "", True), ("", "length", True), ("tool_error", "", False)]


def test_evaluations_of_slime_are_marked(tmp_path: Path):
    """Their file is `eval_N.pt` beside those of the training."""
    import torch

    samples = [json.loads(line) for line in (DATA / "slime" / "samples.jsonl").read_text().splitlines()][:2]
    (tmp_path / "dump").mkdir()
    for name in ("3", "eval_3"):
        torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "dump" / f"{name}.pt")
    import_files([tmp_path / "dump"], tmp_path / "store")
    found = columns(tmp_path / "store", "evaluation", "policy_version")
    assert found == [(False, 3), (False, 3), (True, 3), (True, 3)]


def test_agents_that_an_agent_called_are_compared_with_each_other(tmp_path: Path, jsonl: Write):
    """Not with the one that called them, whose name in ATIF may be theirs, too."""

    def agent(prompt: list[int], tokens: list[int], **more: Any) -> dict[str, Any]:
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": tokens}
        steps = [{"step_id": 1, "source": "user", "message": "q"}]
        steps.append({"step_id": 2, "source": "agent", "message": "a", "llm_call_count": 1, "metrics": metrics})
        return {"schema_version": "ATIF-v1.8", "agent": {"name": "terminus", "version": "2"}, "steps": steps, **more}

    rows = [
        agent([1], [3], extra={"reward": reward, "group": 1}, subagent_trajectories=[agent([5], [6])])
        for reward in (1.0, 0.0)
    ]
    import_files([jsonl(rows, "x.atif.jsonl")], tmp_path / "store")
    found = columns(tmp_path / "store", "group_id", "task_reward")
    assert [reward for _, reward in found] == [1.0, 1.0, 0.0, 0.0]
    (first, other, same, again) = [group for group, _ in found]
    assert (first, other) == (same, again)
    assert first != other


# -- OpenRLHF ----------------------------------------------------------------------------------------------------------


def test_a_table_of_openrlhf_has_no_prompts(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """OpenRLHF 0.11 writes one table, of W&B: prompt and response in one text."""
    file = jsonl([{"global_step": 1, "text": "1+1=2", "reward": 1.0}] * 2)
    with pytest.raises(DefinitionError, match=r"no field for prompt or completion.*global_step, reward, text"):
        import_files([file], tmp_path / "store", tokenizer=tokenizer)


# -- rows that are not as a writer writes them -------------------------------------------------------------------------

WRONG: tuple[Any, ...] = (None, 1.5, "x", [], [[1]], {"a": 1})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each field, however deep."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value[:1]):
        yield (*path, key)
        if isinstance(part, (dict, list)):
            yield from places(part, (*path, key))


def spoiled(row: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(row)
    part: Any = made
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return made


@pytest.mark.parametrize("tool", ["prime-rl", "tinker", "slime", "nemo-rl", "open-instruct", "inspect"])
def test_any_wrong_field_is_a_sentence(tmp_path: Path, jsonl: Write, chat_tokenizer: Any, tool: str):
    """Of a later row, too, whatever stands there: never a traceback, and never more than the rows before it."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "2"}]
    sample = {"id": 1, "epoch": 1, "input": "q", "target": "2", "messages": talk, "scores": {"m": {"value": "C"}}}
    sample |= {"output": {"choices": [{"stop_reason": "stop"}]}}
    row = {
        "prime-rl": lambda: episodes()[0],
        "tinker": lambda: call("train", 0, 0, [3]),
        "slime": lambda: episodes("slime/samples.jsonl")[0],
        "nemo-rl": lambda: episodes("nemo_rl/train_data_step4.jsonl")[0],
        "open-instruct": lambda: episodes("open_instruct/run_rollouts_000000.jsonl")[0],
        "inspect": lambda: {"eval": {"task": "t"}, "samples": [sample]},
    }[tool]()
    rows = [spoiled(row, path, WRONG[i % len(WRONG)]) for i, path in enumerate(places(row))]
    file = jsonl([row, *rows], "traces.jsonl")
    try:
        report = import_files([file], tmp_path / "store", tokenizer=chat_tokenizer, group="none", skip_bad=len(rows))
    except DefinitionError:
        return
    counted = report.num_imported + report.num_skipped + report.files[0].num_left_out + len(report.files[0].bad)
    assert counted == 1 + len(rows)
    assert any("this row does not match the format of" in bad for bad in report.files[0].bad) or tool in (
        "slime",
        "open-instruct",
    )


def test_evaluations_are_said_by_the_command(
    tmp_path: Path, jsonl: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """And nobody is told that in no group two rewards differ."""
    monkeypatch.chdir(tmp_path)
    rows = [call("test", 0, 0, [3]), call("test", 1, 0, [4])]
    rewards = [summary("test", 0, 0, 1.0, 3), summary("test", 1, 0, 1.0, 3)]
    jsonl(rows, "sample.jsonl")
    jsonl(rewards, "r.jsonl")
    assert main(["import", "sample.jsonl", "r.jsonl", "--into", "store"]) == 0
    said = capsys.readouterr()
    assert "2 trajectories from evaluations, which are marked" in said.out + said.err
    assert "NOTICE" not in said.out + said.err
