"""The definitions that ship with the project, run as a user runs them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rlhf_pipeline import CausalLMPolicy
from rlhf_pipeline.cli import main
from rlhf_pipeline.definitions import find
from rlhf_pipeline.policies.chat import encode_prompt
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.run.rows import StepRows
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that types a command, in this process and an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def typed(*words: object) -> str:
        code = main([str(word) for word in words])
        shown = capsys.readouterr()
        assert code == 0, shown
        return shown.out

    return typed


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_copy_digits_learns(command, tmp_path, seed):
    """From at most 0.2 to at least 0.95 for every seed, and the stored trajectories say the same."""
    run_dir = tmp_path / "runs" / "copy_digits"
    # Seed 0 as the README prints it.
    shown = command("run", "copy_digits", *([] if seed == 0 else ["--seed", str(seed)]))
    assert "target reached" in shown
    assert (run_dir / "report.html").is_file()
    rewards = [row["task_reward"] for row in StepRows(run_dir / "metrics.jsonl") if "task_reward" in row]
    assert rewards[0] <= 0.2
    assert min(rewards[-3:]) >= 0.95
    inspected = command("inspect", run_dir, "--grade")
    assert inspected.count("agrees") == 2
    command("verify", run_dir)


def test_lookup_tool_calls_its_tool(command, tmp_path):
    """In forty steps calls come up from nothing; what a tool was asked, said and was graded for is stored as it was."""
    run_dir = tmp_path / "run"
    command("run", "lookup_tool", "--out", run_dir, "--steps", "40", "--set", "evaluate.num_prompts=32")
    assert command("inspect", run_dir, "--grade").count("agrees") == 2
    shares = [row["reward/called"] for row in StepRows(run_dir / "metrics.jsonl")]
    assert shares[0] < 0.05
    assert shares[-1] > 0.15
    source = find("lookup_tool").pipeline().prompts
    held_out = dataclasses.replace(source, held_out=True)
    asked, others = ({one.prompt(i, seed=0).text for i in range(2000)} for one in (source, held_out))
    assert (len(asked), len(others), asked & others) == (48, 16, set())
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "checkpoints" / "step-00000040")
    assert tokenizer.parse_response("?ab", prefix="ab=")["tool_calls"][0]["function"]["arguments"] == {"key": "ab"}
    with TrajectoryStore.open(run_dir / "store") as store:
        rows = store.read(store.ids(), ["group_id", "input_ids", "assistant_mask", "reward_called"])
    found = 0
    for group, ids, mask, called in zip(*rows.values(), strict=True):
        one, text = source.prompt(int(group), seed=0), tokenizer.decode(ids)
        key, value = one.text, one.answer
        if text.startswith(f"{key}=?{key}"):
            assert text.startswith(f"{key}=?{key}<|im_end|>{value}=")
            assert mask[:11].tolist() == [False] * 3 + [True] * 3 + [False] * 5
            assert called == 1
            found += 1
    assert found


def test_gsm8k_evaluated_tells_its_test_questions_and_keeps_the_best(command, tmp_path, gsm8k_dir):
    """Two rewards with curves of their own, and an evaluation at the start and after step 2 on other questions."""
    lines = (gsm8k_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:40]))
    (tmp_path / "test.jsonl").write_text("\n".join(lines[40:46]))
    new_model(tmp_path / "model", text_file=tmp_path / "train.jsonl", vocab_size=512, hidden_size=32, num_layers=1)
    settings = {
        "policy.path": tmp_path / "model",
        "prompts.path": tmp_path / "train.jsonl",
        "evaluate.prompts.path": tmp_path / "test.jsonl",
        "evaluate.every": 2,
        "collect.prompts_per_rollout": 2,
        "collect.group_size": 4,
        "collect.max_new_tokens": 16,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    shown = command("run", "gsm8k_evaluated", "--out", tmp_path / "run", "--steps", "2", *words)
    assert "evaluation of step 0: reward" in shown
    last = list(StepRows(tmp_path / "run" / "metrics.jsonl"))[-1]
    assert {"reward/final_number_match", "reward/length", "evaluation/pass@4", "evaluation/reward_low"} <= last.keys()
    assert (tmp_path / "run" / "checkpoints" / "step-00000000").is_dir()


def test_gsm8k_runs_with_real_questions(command, tmp_path, gsm8k_dir):
    """Three steps on real questions with a checkpoint folder: nothing is tokenized twice, every token has its score."""
    questions = gsm8k_dir / "train.jsonl"
    new_model(tmp_path / "model", text_file=questions, vocab_size=1024, hidden_size=32, num_layers=2)
    run_dir = tmp_path / "run"
    settings = {
        "policy.path": tmp_path / "model",
        "prompts.path": questions,
        "collect.prompts_per_rollout": 4,
        "collect.group_size": 4,
        "collect.max_new_tokens": 48,
        "learn.lr": 1e-4,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command("run", "gsm8k", "--out", run_dir, "--steps", "3", *words)

    policy = CausalLMPolicy.from_pretrained(tmp_path / "model")
    source = dataclasses.replace(find("gsm8k").build().prompts, path=str(questions))
    with TrajectoryStore.open(run_dir / "store") as store:
        ids, versions = store.ids(), store.read_scalars("policy_version")
        assert sorted(set(versions.tolist())) == [0, 1, 2]
        assert len(np.unique(store.read_scalars("group_id"))) == 12
        rows = store.read(
            ids[versions == 0],
            ["prompt", "input_ids", "log_probs", "ref_log_probs", "assistant_mask", "group_id", "num_prompt_tokens"],
        )
    for index, tokens in enumerate(rows["input_ids"]):
        prompt = source.prompt(int(rows["group_id"][index]), seed=0)
        question = prompt.text
        assert prompt.messages is not None
        assert [message["role"] for message in prompt.messages] == ["system", "user"]
        prompt_length = rows["num_prompt_tokens"][index]
        assert rows["prompt"][index] == question
        assert tokens[:prompt_length].tolist() == encode_prompt(policy.tokenizer, prompt.messages)
        mask = torch.from_numpy(rows["assistant_mask"][index]).bool()
        assert mask.tolist() == [False] * int(prompt_length) + [True] * (len(tokens) - int(prompt_length))
        ids_row = torch.from_numpy(tokens).long()[None]
        with torch.no_grad():
            scored = policy.log_probs(ids_row, torch.ones_like(ids_row, dtype=torch.bool), mask[None])[0]
        for column in ("log_probs", "ref_log_probs"):
            stored = torch.from_numpy(rows[column][index])
            assert (scored - stored)[mask].abs().max() < 1e-5
    shown = command("show", run_dir)
    assert "log-prob" in shown
    assert "policy" in shown
