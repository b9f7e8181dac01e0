"""What a completion begins with: a text that is continued, and a chat template from a file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rlhf_pipeline import Evaluate, Pipeline, PretrainedPolicy, Prompts
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, RunMismatchError
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import Calculator, changed, newest, tiny
from trajectory_store import TrajectoryStore

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(6)]
SEEN: list[tuple[str, str]] = []


def begins(prompt_text: str, completion: str) -> float:
    """Pay completions that begin as they were told to; note what was shown."""
    SEEN.append((prompt_text, completion))
    return float(completion.startswith("<think>")) + len(completion) / 1000


@pytest.fixture
def chat(tmp_path: Path) -> Pipeline:
    """A run on a small chat model."""
    (tmp_path / "text.txt").write_text("0 + 1 + 2 = 3? <think> so\n" * 20, encoding="utf-8")
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    new_model(tmp_path / "model", text_file=tmp_path / "text.txt", **sizes)
    base = tiny(collect__max_new_tokens="5", collect__prompts_per_rollout="2")
    model = PretrainedPolicy(path=str(tmp_path / "model"))
    SEEN.clear()
    return dataclasses.replace(base, policy=model, prompts=Prompts(rows=ROWS[:4]), reward=begins)


def test_a_completion_continues_its_prefix(chat: Pipeline, tmp_path: Path):
    """Rewards, store and evaluation see the text with its prefix; its tokens are the prompt's, and are not learned."""
    asked = changed(chat, collect__prefill="<think>")
    asked = dataclasses.replace(asked, evaluate=Evaluate(prompts=Prompts(rows=ROWS[4:]), every=1, num_prompts=2))
    run(asked, run_dir=tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prefix = tokenizer.encode("<think>", add_special_tokens=False)
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt, _ in SEEN)
    assert all(completion.startswith("<think>") for _, completion in SEEN)
    policy = TokenPolicy.from_pretrained(tmp_path / "model")
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        rows = store.read(store.ids())
    for at, ids in enumerate(rows["input_ids"]):
        start = rows["num_prompt_tokens"][at]
        assert ids[start - len(prefix) : start].tolist() == prefix
        assert not rows["assistant_mask"][at][:start].any()
        assert rows["completion"][at].startswith("<think>")
        if rows["policy_version"][at] == 0:
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            scored = policy.log_probs(tokens, torch.ones_like(tokens, dtype=torch.bool))[0, start:].detach()
            torch.testing.assert_close(torch.tensor(rows["log_probs"][at][start:]), scored, atol=1e-5, rtol=0)
    with TrajectoryStore.open(next((tmp_path / "run" / "evaluations").rglob("zarr.json")).parent) as store:
        assert all(text.startswith("<think>") for text in store.read(store.ids(), ["completion"])["completion"])
    with pytest.raises(DefinitionError, match="the conversations of an environment have several turns"):
        dataclasses.replace(asked, environment=Calculator)


def test_a_chat_template_of_a_file(chat: Pipeline, tmp_path: Path):
    """It takes the place of the tokenizer's, goes into checkpoints, and may not change; a missing one is named."""
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}> {% endif %}")
    asked = changed(chat, policy__chat_template=str(file), learn__steps="1")
    run(asked, run_dir=tmp_path / "run")
    assert {prompt for prompt, _ in SEEN} <= {f"[{row['question']}]> " for row in ROWS}
    assert AutoTokenizer.from_pretrained(newest(tmp_path / "run")).chat_template == file.read_text()
    assert (tmp_path / "run" / "inputs" / "policy.chat_template" / "mine.jinja").read_text() == file.read_text()
    file.write_text(file.read_text() + " ")
    with pytest.raises(RunMismatchError, match=r"mine\.jinja \(policy\.chat_template\) has changed"):
        run(changed(asked, learn__steps="2"), run_dir=tmp_path / "run", resume=True)
    missing = changed(asked, policy__chat_template=str(tmp_path / "other.jinja"))
    with pytest.raises(MissingPathError, match=r"there is no chat template at .*other\.jinja"):
        run(missing, run_dir=tmp_path / "other")


def test_a_prefix_needs_room(chat: Pipeline, tmp_path: Path):
    """What fits without it may be too long with it, and is refused before anything is sampled."""
    policy = TokenPolicy.from_pretrained(tmp_path / "model")
    room = policy.max_positions
    assert room is not None
    with pytest.raises(DataError, match="no completion fits"):
        run(changed(chat, collect__prefill="so " * room), run_dir=tmp_path / "run")
