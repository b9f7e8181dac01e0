"""What docs/use_the_model.md shows is run, on the results of a run and of a run with LoRA."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_pipeline import CausalLMPolicy
from rlhf_pipeline.cli import main
from rlhf_pipeline.learner.lora import add_adapters
from rlhf_pipeline.policies.new_model import new_model
from rlhf_pipeline.policies.weight_files import load_weights

PAGE = Path(__file__).resolve().parents[1] / "docs" / "use_the_model.md"
SMALL = {
    "policy.path": "model",
    "prompts.path": "train.jsonl",
    "collect.prompts_per_rollout": 2,
    "collect.group_size": 2,
    "collect.max_new_tokens": 8,
}


def blocks() -> dict[str, str]:
    """Return the page's code by the library that it begins with."""
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {re.findall(r"^from (?!pathlib)(\w+)", text, flags=re.MULTILINE)[0]: text for text in found}


def go(name: str, *more: str) -> None:
    """Run a step of gsm8k on a small model."""
    settings = [word for field, value in SMALL.items() for word in ("--set", f"{field}={value}")]
    assert main(["run", "gsm8k", "--steps", "1", "--out", f"runs/{name}", *settings, *more]) == 0


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The printed folder loads in transformers, here and with peft; merged adapters are the adapted model."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"How many are {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(60)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    new_model("model", text_file="train.jsonl", vocab_size=300, hidden_size=32, num_layers=1, num_heads=2)
    go("gsm8k")
    assert "the trained model: runs/gsm8k/checkpoints/step-00000001" in capsys.readouterr().out
    code, names = blocks(), dict[str, Any]()
    assert set(code) == {"transformers", "rlhf_pipeline", "vllm", "peft"}
    exec(code["transformers"], names)
    assert names["folder"] == Path("runs/gsm8k/checkpoints/step-00000001")
    assert isinstance(names["answer"], str)
    exec(code["rlhf_pipeline"], names)
    assert len(names["completions"]) == 1
    if importlib.util.find_spec("vllm") is not None and torch.cuda.is_available():
        exec(code["vllm"], names)
        assert isinstance(names["text"], str)
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed")
    go("lora", "--set", "policy.lora_rank=2", "--set", "loss.entropy_coeff=0.1", "--set", "learn.lr=1e-2")
    assert "the trained adapters: runs/lora/checkpoints/step-00000001" in capsys.readouterr().out
    with warnings.catch_warnings():  # peft calls transformers by an older name
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        exec(code["peft"], names)
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        merged = names["AutoModelForCausalLM"].from_pretrained("merged")(tokens).logits
        alone = names["AutoModelForCausalLM"].from_pretrained("model")(tokens).logits
    assert not torch.equal(merged, alone)
    policy = CausalLMPolicy.from_pretrained("model")
    add_adapters(policy, rank=2, alpha=32.0, targets="all-linear", seed=0)
    load_weights(Path("runs/lora/checkpoints/step-00000001"), policy.model)
    with torch.no_grad():
        adapted = policy.model(tokens).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
