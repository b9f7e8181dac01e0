"""What a row says of itself is decided in one place: groups, failures, temperature and version, evaluations."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import import_files
from trajectory_store import TrajectoryStore

from .conftest import Write

DATA = Path(__file__).parent / "data"


def columns(store: Path) -> dict[str, Any]:
    """Return all columns of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read(opened.ids())


def plain(prompt: int, reward: float, **more: Any) -> dict[str, Any]:
    return {"prompt_ids": [5, prompt], "completion_ids": [7], "reward": reward, **more}


SHUFFLED = [plain(6 + prompt, float(member % 2)) for prompt in range(16) for member in range(4)]
random.Random(1).shuffle(SHUFFLED)


@pytest.mark.parametrize("rows", [SHUFFLED, [plain(p, 0.5) for p in (1, 1, 2, 2, 1, 1, 2, 2)]], ids=["any", "even"])
def test_a_prompt_that_comes_back_is_refused(tmp_path: Path, jsonl: Write, rows: list[dict[str, Any]]):
    """Without a field that names groups nobody knows whether it is one group; what the message names works."""
    prompts = [row["prompt_ids"][1] for row in rows]
    file = jsonl(rows)
    with pytest.raises(
        DefinitionError, match=r"a prompt reappears after other prompts.*--group FIELD.*--group-by prompt"
    ):
        import_files([file], tmp_path / "store")
    assert not (tmp_path / "store").exists()
    import_files([file], tmp_path / "by_prompt", by_prompt=True)
    ids = [{"uid": ""}, {"group_id": ""}, {"group": ""}, {"step": 1}]
    found = [columns(tmp_path / "by_prompt")["group_id"].tolist()]
    for place, field in enumerate(ids):
        (name,) = field
        named = [row | {name: field[name] if name == "step" else f"q{row['prompt_ids'][1]}"} for row in rows]
        import_files([jsonl(named, f"{place}.jsonl")], tmp_path / f"{place}")
        found.append(columns(tmp_path / f"{place}")["group_id"].tolist())
    order = list(dict.fromkeys(prompts))
    assert found == [[order.index(prompt) for prompt in prompts]] * 5


def test_a_group_of_two_prompts_is_refused(tmp_path: Path, jsonl: Write):
    """open-instruct counts prompts after it dropped rows, and any tool's ids may be wrong."""
    row = json.loads((DATA / "open_instruct" / "run_rollouts_000000.jsonl").read_text().splitlines()[0])
    row |= {"logprobs": None, "request_info": None}
    prompts = [[5, 6]] * 3 + [[5, 9]] * 4
    rows = [row | {"sample_idx": i, "prompt_idx": i // 4, "prompt_tokens": p} for i, p in enumerate(prompts)]
    for name, given in (("run_rollouts_000000", rows), ("plain", [plain(1, 1.0, group=1), plain(2, 0.0, group=1)])):
        with pytest.raises(DataError, match=r"jsonl:\d: the group of this trajectory has members with other prompts"):
            import_files([jsonl(given, f"{name}.jsonl")], tmp_path / name)


@pytest.mark.parametrize(
    ("said", "kind", "end"),
    [
        ({"error": "SandboxError"}, "tool_error", ""),
        ({"error": {"error": "ProviderError", "detail": "x"}}, "engine", ""),
        ({"error": True}, "tool_error", ""),
        ({"status": "failed"}, "tool_error", ""),
        ({"status": "timeout"}, "timeout", ""),
        ({"state": "ABORTED"}, "engine", ""),
        ({"failed": 1.0}, "tool_error", ""),
        ({"timed_out": "True"}, "timeout", ""),
        ({"truncated": True}, "truncated", "length"),
        ({"is_truncated": 1}, "truncated", "length"),
        ({"overlong": True}, "truncated", "length"),
        ({"status": "truncated"}, "truncated", "length"),
        ({"finish_reason": "abort"}, "engine", "abort"),
        ({"finish_reason": "max_tokens"}, "", "length"),
        ({"error": None, "status": "completed", "truncated": False, "failed": 0, "timeout": "no"}, "", ""),
        ({"error": math.nan}, "", ""),
        ({"error": 0.25, "errors": [], "exception": "None"}, "", ""),
        ({"status": "success", "finish_reason": "stop"}, "", "stop"),
        ({"error": "TimeoutError: no reply in 30 s"}, "timeout", ""),
        ({"state": "You stand in the server room. A guard watches."}, "", ""),
        ({"state": "Pending move: white", "timeout": 30, "truncated": 12}, "", ""),
        ({"error": "no error", "exception": "None", "errors": "[]", "failed": "[]"}, "", ""),
        ({"error": {"code": 0}, "status": "completed_without_errors"}, "", ""),
        ({"status": "finished, 0 failures", "overlong": 0.0}, "", ""),
        ({"status": "reward computed", "error": "success"}, "", ""),
    ],
    ids=str,
)
def test_a_row_that_failed_is_no_zero(tmp_path: Path, jsonl: Write, said: dict[str, Any], kind: str, end: str):
    """Its reward is not trusted, and kept beside; a number under such a name measures something and is none."""
    import_files([jsonl([plain(1, 1.0), plain(1, 0.0, **said)])], tmp_path / "store")
    found = columns(tmp_path / "store")
    assert (found["failure_reason"], found["finish_reason"]) == (["", kind], ["", end])
    assert found["reward_trusted"].tolist() == [True, not kind]
    assert np.isnan(found["task_reward"][1]) == bool(kind)
    assert json.loads(found["meta"][1]).get("untrusted_reward") == (0.0 if kind else None)


def test_results_of_verifiers_before_traces(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """A rollout whose sandbox broke has an error and the reward 0, which says nothing."""

    def row(reward: float, said: str, **more: Any) -> dict[str, Any]:
        talk = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": said}]}
        more = {"is_completed": True, "is_truncated": False, "metrics": {"correct": reward}, **more}
        return {"example_id": 0, **talk, "answer": "4", "reward": reward, **more}

    broken = {"error": {"error": "SandboxError"}, "stop_condition": "has_error"}
    rows = [row(1.0, "4"), row(0.0, "5"), row(0.0, "4", **broken), row(0.0, "4", is_truncated=True)]
    report = import_files([jsonl(rows, "results.jsonl")], tmp_path / "store", tokenizer=chat_tokenizer)
    found = columns(tmp_path / "store")
    assert (report.files[0].format, report.num_groups) == ("verifiers", 1)
    assert found["failure_reason"] == ["", "", "tool_error", ""]
    assert np.array_equal(found["task_reward"], [1, 0, math.nan, 0], equal_nan=True)
    assert found["finish_reason"] == ["", "", "", "length"]


def test_episodes_that_are_stored_twice_are_one(tmp_path: Path):
    """prime-rl writes what it trained on again into `effective`, and marks no evaluation but by its folder."""
    kinds = ("train/all", "train/effective", "eval/all", "eval/effective")
    for kind in kinds:
        (tmp_path / "rollouts/step_9" / kind).mkdir(parents=True)
        shutil.copy(DATA / "prime_rl/rollouts/step_9/train/all/traces.jsonl", tmp_path / "rollouts/step_9" / kind)
    files = [tmp_path / "rollouts/step_9" / kind / "traces.jsonl" for kind in kinds]
    report = import_files(files, tmp_path / "store")
    assert [file.num_imported for file in report.files] == [5, 0, 5, 0]
    assert columns(tmp_path / "store")["evaluation"].tolist() == [False] * 5 + [True] * 5


def test_what_nobody_says_is_unknown(tmp_path: Path, jsonl: Write):
    """Temperature, mode and version are a tool's word or unknown, in every store; a given one is kept."""
    import_files([jsonl([plain(1, 1.0), plain(1, 0.0)])], tmp_path / "store")
    found = columns(tmp_path / "store")
    assert np.isnan(found["temperature"]).all()
    assert (found["log_prob_mode"], found["policy_version"].tolist()) == (["", ""], [-1, -1])
    said = {"temperature": 0.5, "log_prob_mode": "processed", "policy_version": 0}
    import_files([jsonl([plain(1, 1.0, **said), plain(1, 0.0, **said)])], tmp_path / "said")
    found = columns(tmp_path / "said")
    assert (found["temperature"].tolist(), found["log_prob_mode"]) == ([0.5] * 2, ["processed"] * 2)
    assert found["policy_version"].tolist() == [0, 0]
    with pytest.raises(DataError, match=r"'temperature' must be a temperature of at least 0"):
        import_files([jsonl([plain(1, 1.0, temperature=-1)])], tmp_path / "none")


def verl_row(answer: str, reward: float, number: int) -> dict[str, Any]:
    about = {"input": "Find x.", "output": f"{answer} {number}", "gts": answer, "score": reward, "step": 1}
    return about | {"request_id": f"{answer}-{number}"}


def test_one_text_with_two_answers_is_two_groups(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """Verl's and SkyRL's rows have no id of the prompt: its text and its answer identify it."""
    rows = [verl_row(answer, float(answer == "12"), number) for number in range(4) for answer in ("12", "7")]
    import_files([jsonl(rows, "1.jsonl")], tmp_path / "verl", tokenizer=chat_tokenizer, one_turn=True)
    assert columns(tmp_path / "verl")["group_id"].tolist() == [0, 1] * 4
    row = {"input_prompt": "Find x.", "output_response": "12", "stop_reason": "stop", "env_class": "gsm8k"}
    rows = [
        row | {"score": float(member), "data_source": "d", "env_extras": {"reward_spec": {"ground_truth": answer}}}
        for member in range(2)
        for answer in "12"
    ]
    import_files([jsonl(rows, "global_step_3_evals/d.jsonl")], tmp_path / "skyrl", tokenizer=chat_tokenizer)
    assert columns(tmp_path / "skyrl")["group_id"].tolist() == [0, 1, 0, 1]


def test_stored_advantages_must_fit_the_groups(tmp_path: Path, chat_tokenizer: Any):
    """One prompt for all rows of a TRL table: its advantages show groups of 4, and the message asks for `--group 4`."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0]]
    advantages = [reward - sum(group) / 4 for group in rewards for reward in group]
    table = {"step": [1] * 16, "prompt": ["Play."] * 16, "completion": [f"g{i}" for i in range(16)]}
    table |= {"right": [reward for group in rewards for reward in group], "advantage": advantages}
    file = tmp_path / "completions_00001.parquet"
    parquet.write_table(pyarrow.table(table), file)
    options: dict[str, Any] = {"tokenizer": chat_tokenizer, "one_turn": True}
    with pytest.raises(DefinitionError, match=r"contradict the grouping by prompt in 1 of 1 groups.*--group 4"):
        import_files([file], tmp_path / "store", **options)
    import_files([file], tmp_path / "store", group=4, **options)
    assert columns(tmp_path / "store")["group_id"].tolist() == [place // 4 for place in range(16)]
    import_files([file], tmp_path / "confirmed", by_prompt=True, **options)
    assert columns(tmp_path / "confirmed")["group_id"].tolist() == [0] * 16
