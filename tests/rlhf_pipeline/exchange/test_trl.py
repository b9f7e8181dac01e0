"""Inside TRL's own GRPOTrainer: two steps of a tiny model on a CPU."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pipeline.exchange import TrajectoryRecorder, import_files
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]  # its warnings are not ours

TEMPERATURE = 0.7
ALPHABET = "0123456789+="


@pytest.fixture(scope="module")
def trl() -> Any:
    """TRL, if it is installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl", reason="the peer TRL is not installed: pip install trl==1.16.*")


def tiny(tokenizer: Any) -> Any:
    """Return a small Llama with dropout, made from a seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.1,
        eos_token_id=1,
        pad_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(wanted in text) - len(text) / 100 for text, wanted in zip(completions, answer, strict=True)]


def train(
    trl: Any, tokenizer: Any, folder: Path, funcs: list[Any], recorder: TrajectoryRecorder | None, **changes: Any
) -> Any:
    """Train two steps and return the trainer."""
    resume, evaluates = changes.pop("resume", None), changes.pop("evaluates", False)
    from datasets import Dataset

    rows = [{"prompt": f"{i}+{i}" + "=" * (1 + i % 2), "answer": str(2 * i)} for i in range(8)]
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        learning_rate=1e-2,
        temperature=TEMPERATURE,
        log_completions=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
        disable_dropout=False,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    trainer = trl.GRPOTrainer(
        tiny(tokenizer),
        reward_funcs=funcs,
        args=config,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:3]) if evaluates else None,
        processing_class=tokenizer,
    )
    if recorder is not None:
        recorder.attach(trainer, record_eval=evaluates)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_attached_to_the_trainer(trl: Any, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]):
    """Every completion is stored with TRL's own ids, rewards and advantages, and training is not changed by it."""
    plain = train(trl, tokenizer, tmp_path / "plain", [right], None)
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        trainer = train(trl, tokenizer, tmp_path / "recorded", [right], recorder)
    for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)

    with TrajectoryStore.open(tmp_path / "store") as store:
        rows = store.read(store.ids())
    assert len(rows["group_id"]) == 16
    assert rows["group_id"].tolist() == np.repeat(np.arange(0, 16, 4), 4).tolist()
    assert rows["policy_version"].tolist() == [0] * 8 + [1] * 8
    for i, text in enumerate(rows["prompt"]):
        start = rows["num_prompt_tokens"][i]
        assert rows["input_ids"][i][:start].tolist() == [ord(letter) for letter in text]
        ended = rows["input_ids"][i][-1] == 1
        assert rows["finish_reason"][i] == ("stop" if ended else "length")
        answer = json.loads(rows["meta"][i])["answer"]
        assert rows["task_reward"][i] == np.float32(right([rows["completion"][i]], [answer])[0])
    for group in range(4):
        rewards, advantages = (rows[name][4 * group : 4 * group + 4] for name in ("task_reward", "advantage"))
        wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(advantages, wanted, atol=1e-4)

    model = copy.deepcopy(tiny(tokenizer)).eval()  # the policy of version 0
    for i in range(8):
        ids, mask = torch.tensor(rows["input_ids"][i]).long(), rows["assistant_mask"][i]
        with torch.no_grad():
            scores = torch.log_softmax(model(ids[None]).logits[0].double() / TEMPERATURE, dim=-1)
        wanted = scores[:-1].gather(1, ids[1:, None])[:, 0].numpy()
        assert np.isnan(rows["log_probs"][i][~mask]).all()
        np.testing.assert_allclose(rows["log_probs"][i][mask], wanted[mask[1:]], atol=1e-4)
    assert not np.allclose(rows["log_probs"][8][rows["assistant_mask"][8]], 0)


def test_evaluation_beside_training(trl: Any, tmp_path: Path, tokenizer: Any):
    """Groups are as large as their mode says, and each has one prompt, whatever was recorded before."""
    changes = {"evaluates": True, "num_generations_eval": 2, "per_device_eval_batch_size": 2}
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        train(trl, tokenizer, tmp_path, [right], recorder, eval_strategy="steps", eval_steps=1, **changes)
    with TrajectoryStore.open(tmp_path / "store") as store:
        rows = store.read(store.ids(), ["group_id", "prompt"])
    prompts: dict[int, list[str]] = {}
    for group, prompt in zip(rows["group_id"].tolist(), rows["prompt"], strict=True):
        prompts.setdefault(group, []).append(prompt)
    assert {len(set(members)) for members in prompts.values()} == {1}
    assert sorted(map(len, prompts.values())) == [2] * 6 + [4] * 4  # two evaluations of three prompts, two steps of two


def test_as_reward_functions(trl: Any, tmp_path: Path, tokenizer: Any):
    """Through the reward functions: the same trajectories with NaN log-probs, and TRL's table imports to the same."""
    with TrajectoryRecorder(tmp_path / "store", tokenizer=tokenizer, group_size=4) as recorder:
        train(trl, tokenizer, tmp_path, recorder.reward_funcs([right]), None)
    tables = tmp_path / "out" / "completions"
    report = import_files([tables], tmp_path / "tables", tokenizer=tokenizer, one_turn=True)
    assert report.num_imported == 16
    assert all("reward=right" in file.about for file in report.files)
    with TrajectoryStore.open(tmp_path / "store") as a, TrajectoryStore.open(tmp_path / "tables") as b:
        recorded, imported = a.read(a.ids()), b.read(b.ids())
    assert recorded["completion"] == imported["completion"]
    assert np.array_equal(recorded["task_reward"], imported["task_reward"])
    assert np.array_equal(recorded["policy_version"], imported["policy_version"])
    assert recorded["group_id"].tolist() == np.repeat(np.arange(0, 16, 4), 4).tolist()
    assert all(np.isnan(row).all() for row in recorded["log_probs"])
    assert recorded["policy_version"].tolist() == [0] * 8 + [1] * 8


def test_truncated_sampling(trl: Any, tmp_path: Path, tokenizer: Any):
    """What was sampled with top_k has no log-probs here: those of the whole vocabulary are not the sampler's."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        train(trl, tokenizer, tmp_path, [right], recorder, max_steps=1, top_k=5)
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert len(store) == 8
        assert np.isnan(store.read_ragged("log_probs").values).all()


def test_masked_completions_are_masked(trl: Any, tmp_path: Path, tokenizer: Any):
    """What TRL hides as truncated is not learned from, and has no log-probs, as TRL has none of it (T7)."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        settings = {"mask_truncated_completions": True, "num_iterations": 2}
        trainer = train(trl, tokenizer, tmp_path / "recorded", [right], recorder, **settings)
    with TrajectoryStore.open(tmp_path / "store") as store:
        rows = store.read(store.ids())
    cut = [reason == "length" for reason in rows["finish_reason"]]
    assert any(cut)
    for i, is_cut in enumerate(cut):
        scores = rows["log_probs"][i][int(rows["num_prompt_tokens"][i]) :]
        assert rows["assistant_mask"][i].any() != is_cut
        assert np.isnan(scores).all() == is_cut
        assert rows["log_prob_mode"][i] == ("" if is_cut else "processed")
    assert np.isfinite(rows["task_reward"]).all(), "they count for the baseline of their group"
    assert trainer.state.global_step == 2


def test_the_blocks_of_the_page(trl: Any, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    """The TRL blocks of docs/exchange.md run as they are printed, in one folder, and record."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "exchange.md").read_text(encoding="utf-8")
    attached, through_rewards = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    tiny(tokenizer).save_pretrained("model")
    tokenizer.save_pretrained("model")
    names: dict[str, Any] = {}
    for block in (attached, through_rewards):
        exec(compile(block, "docs/exchange.md", "exec"), names)
        names["recorder"].close()
    with TrajectoryStore.open("runs/trl/store") as store:
        assert len(store) == 8


def test_the_block_of_learning_from_a_store(trl: Any, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    """The TRL block of docs/beside.md runs as it is printed: TRL learns from what was recorded, and samples nothing."""
    from datasets import Dataset

    page = (Path(__file__).resolve().parents[3] / "docs" / "beside.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```py\n(.*?)```", page, flags=re.DOTALL)
    with TrajectoryRecorder(tmp_path / "runs" / "old" / "store") as recorder:
        old = train(trl, tokenizer, tmp_path, [right], recorder, max_steps=1)
    rows = [{"prompt": prompt} for prompt in dict.fromkeys(old._logs["prompt"])]
    monkeypatch.chdir(tmp_path)
    tiny(tokenizer).save_pretrained("model")
    tokenizer.save_pretrained("model")
    config = trl.GRPOConfig(
        "out/new", per_device_train_batch_size=8, num_generations=4, max_steps=1, bf16=False, log_completions=True
    )
    names = {"GRPOTrainer": trl.GRPOTrainer, "model": "model", "config": config, "prompts": Dataset.from_list(rows)}
    exec(compile(block, "docs/beside.md", "exec"), names)
    names["trainer"].train()
    assert sorted(names["trainer"]._logs["completion"]) == sorted(old._logs["completion"])


def test_a_training_that_resumes(trl: Any, tmp_path: Path, tokenizer: Any):
    """Steps that TRL takes again after a resume are recorded with the ids that they had before."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        train(trl, tokenizer, tmp_path, [right], recorder, max_steps=3, save_strategy="steps", save_steps=1)
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        checkpoint = str(tmp_path / "out" / "checkpoint-1")
        train(trl, tokenizer, tmp_path, [right], recorder, max_steps=3, resume=checkpoint)
    with TrajectoryStore.open(tmp_path / "store") as store:
        rows = store.read(store.ids())
    assert rows["policy_version"].tolist() == [0] * 8 + [1] * 8 + [2] * 8 + [1] * 8 + [2] * 8
    assert rows["trajectory_id"].tolist() == [*range(24), *range(8, 24)]
    assert rows["prompt"][8:24] == rows["prompt"][24:]


def test_tables_of_one_generation(trl: Any, tmp_path: Path, tokenizer: Any):
    """Of the tables that TRL writes while it takes several steps on a generation, the first is imported."""
    with TrajectoryRecorder(tmp_path / "store") as recorder:
        train(trl, tokenizer, tmp_path, [right], recorder, max_steps=4, num_iterations=2)
    tables = tmp_path / "out" / "completions"
    assert len([*tables.iterdir()]) == 4
    report = import_files([tables], tmp_path / "tables", tokenizer=tokenizer, one_turn=True)
    assert [file.num_left_out for file in report.files] == [0, 8, 0, 8]
    with TrajectoryStore.open(tmp_path / "store") as a, TrajectoryStore.open(tmp_path / "tables") as b:
        recorded, imported = a.read(a.ids()), b.read(b.ids())
    assert recorded["completion"] == imported["completion"]
    assert recorded["policy_version"].tolist() == imported["policy_version"].tolist() == [0] * 8 + [2] * 8
