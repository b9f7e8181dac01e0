from __future__ import annotations

import functools
import math
import sys

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rlhf_pipeline import Learn, scratch_policy
from rlhf_pipeline.buffer.batches import padded_columns
from rlhf_pipeline.data.keys import ASSISTANT_MASK, ATTENTION_MASK, LOG_PROBS, REF_LOG_PROBS, TOKENS
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.learner.lora import add_adapters
from rlhf_pipeline.learner.metrics import ModelCost, StepSeen, data_metrics, kl_metrics, peak_flops_of
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.events import Event
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.loggers import with_logger
from rlhf_pipeline.run.record import Setup
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import qwen2, tiny
from trajectory_store import TrajectoryStore

pipeline = functools.partial(
    tiny, write__kl_coef="0.1", loss__entropy_coeff="0", learn__steps="4", learn__checkpoint_every="4"
)


def qwen(**options) -> TokenPolicy:
    return TokenPolicy(qwen2(8, vocab_size=11, **options), eos_token_id=[])


@pytest.mark.parametrize("tied", [True, False])
def test_the_cost_of_a_model_by_hand(tied):
    """Two layers of q, o [8,8], k, v [4,8] and three MLP matrices [16,8]; a head [11,8] that counts scored tokens."""
    cost = ModelCost.of(qwen(tie_word_embeddings=tied))
    per_layer = 2 * 64 + 2 * 32 + 3 * 128
    assert cost == ModelCost(trained=2 * per_layer, frozen=0, head=88, head_is_trained=True, layers=2, width=8)
    lengths, scored = torch.tensor([5, 3]), torch.tensor([2, 1])
    by_hand = 6 * 2 * per_layer * 8 + 6 * 88 * 3 + 6 * 2 * 8 * (25 + 9)
    assert cost.flops(lengths, scored) == by_hand


def test_experts_cost_the_share_that_sees_a_token():
    """Two of four experts [32,8] and [8,16] do; q, o [8,8], k, v [4,8] and the router [4,8] cost their full size."""
    sizes = {"hidden_size": 8, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 11}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, **sizes, **experts))
    cost = ModelCost.of(TokenPolicy(model, eos_token_id=[]))
    assert cost.trained == 2 * 64 + 2 * 32 + 32 + 2 * (32 * 8 + 8 * 16)


def test_frozen_weights_cost_two_thirds():
    """With LoRA the base and the head have no gradient of their own; the adapters are counted in full."""
    pytest.importorskip("peft")
    policy = scratch_policy("0123456789", hidden_size=16, num_layers=1, num_heads=2, seed=0)
    whole = ModelCost.of(policy)
    add_adapters(policy, rank=2, alpha=4.0, targets="q_proj", seed=0)
    cost = ModelCost.of(policy)
    assert (cost.frozen, cost.trained, cost.head_is_trained) == (whole.trained, 2 * 16 + 16 * 2, False)


def test_peaks_are_known_for_gpus_only():
    """No peak is made up for a CPU."""
    assert peak_flops_of(torch.device("cpu"), torch.bfloat16) is None


def test_every_line_has_the_figures_that_are_documented(tmp_path):
    """Ages, use counts, KL estimates, spread and rates, on a CPU with a peak given and without."""
    run(pipeline(learn__peak_flops="1e9"), run_dir=tmp_path / "run")
    rows = list(StepRows(tmp_path / "run" / "metrics.jsonl"))
    assert [row["staleness_max"] for row in rows] == [0, 1, 0, 1]
    assert [(row["use_count"], row["use_count_max"]) for row in rows] == [(1, 1), (2, 2), (1, 1), (2, 2)]
    for row in rows:
        assert row["advantage_std"] > 0
        assert row["kl_k2"] >= 0
        assert row["kl_k3"] >= 0
        assert 0 <= row["clip_fraction_low"] + row["clip_fraction_high"] <= 1
        assert 0 < row["ess"] <= 1
        assert 0 < row["padding_efficiency"] <= 1
        assert row["update_tokens_per_s"] == pytest.approx(row["num_tokens"] / row["update_s"])
        assert 0 < row["num_scored_tokens"] < row["num_tokens"]
        assert row["peak_memory_mb"] > 1
        assert row["mfu"] > 0
    run(pipeline(), run_dir=tmp_path / "without")
    assert {row.get("mfu") for row in StepRows(tmp_path / "without" / "metrics.jsonl")} == {None}


def test_kl_estimates_are_means_over_the_policys_tokens(tmp_path):
    """k1, k2 and k3 of a step against the stored columns, token by token in Python."""
    run(pipeline(), run_dir=tmp_path / "run")
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        ids = store.ids()[-12:]
        rows = store.read(ids, ["log_probs", "ref_log_probs", "assistant_mask"])
        advantages = store.read_scalars("advantage", ids)
        found = data_metrics(
            StepSeen(step=1, store=store, row_ids=ids, advantages=advantages, ages=ids * 0, uses=ids - ids[0])
        )
        keys = [LOG_PROBS, REF_LOG_PROBS, ASSISTANT_MASK, ATTENTION_MASK, TOKENS]
        cut = [torch.tensor([5, 0, 2, 3, 4, 1]), torch.tensor([8, 9, 10, 11, 6, 7])]
        read = [padded_columns(store, ids[at.numpy()], keys=keys) for at in cut]
        parts = {
            int(at[0]): LossBatch(
                tokens=columns[TOKENS],
                attention=columns[ATTENTION_MASK],
                candidates=columns[ASSISTANT_MASK],
                mask=columns[ASSISTANT_MASK],
                behaviour=columns[LOG_PROBS],
                advantage=columns[LOG_PROBS],
                ref=columns[REF_LOG_PROBS],
            )
            for at, columns in zip(cut, read, strict=True)
        }
        found |= kl_metrics(parts, cut)
        of_second = kl_metrics({int(cut[1][0]): parts[int(cut[1][0])]}, cut)  # another process has the first part
    gaps_by_row = [
        [
            float(own) - float(reference)
            for own, reference, mine in zip(
                rows["log_probs"][i], rows["ref_log_probs"][i], rows["assistant_mask"][i], strict=True
            )
            if mine
        ]
        for i in range(len(ids))
    ]
    gaps = [gap for row in gaps_by_row for gap in row]
    assert (found["use_count"], found["use_count_max"]) == (6.5, 12)
    assert found["kl_k1"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-6)
    assert found["kl_k2"] == pytest.approx(sum(g * g / 2 for g in gaps) / len(gaps), rel=1e-6)
    assert found["kl_k3"] == pytest.approx(sum(math.exp(-g) - 1 + g for g in gaps) / len(gaps), rel=1e-6)
    assert found["kl_per_trajectory"] == pytest.approx(sum(gaps) / len(ids), rel=1e-6)
    assert of_second["kl_per_trajectory"] == pytest.approx(sum(map(sum, gaps_by_row[6:])) / len(ids), rel=1e-6)


def test_metrics_go_to_csv_files_once(tmp_path):
    """Each figure has a file with one line per step, over a resume as well."""
    run(pipeline(learn__logger="csv"), run_dir=tmp_path / "run")
    longer = pipeline(learn__logger="csv")
    run(longer, run_dir=tmp_path / "run", resume=True)
    (file,) = (tmp_path / "run" / "logs").rglob("grad_norm.csv")
    steps, values = zip(*(line.split(",") for line in file.read_text().splitlines()), strict=True)
    assert [int(step) for step in steps] == [1, 2, 3, 4]
    recorded = [row["grad_norm"] for row in StepRows(tmp_path / "run" / "metrics.jsonl")]
    assert [float(value) for value in values] == pytest.approx(recorded)
    (hparams,) = (tmp_path / "run" / "logs").rglob("hparams*.txt")
    text = hparams.read_text()
    assert "learn.lr: " in text
    assert "seed: 0" in text


def test_a_run_may_have_another_name_from_a_resume_on(tmp_path):
    """What is logged from there on is under that name."""
    run(pipeline(learn__logger="csv", learn__steps="2"), run_dir=tmp_path / "run")
    again = pipeline(learn__logger="csv", learn__logger_name="second", learn__steps="4")
    run(again, run_dir=tmp_path / "run", resume=True)
    (file,) = (tmp_path / "run" / "logs" / "second").rglob("grad_norm.csv")
    assert [int(line.split(",")[0]) for line in file.read_text().splitlines()] == [3, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logger_project": "p"}, "logger_project needs logger=wandb or logger=trackio, but the logger is None"),
        ({"logger": "csv", "logger_samples": 3}, "need logger=wandb, but the logger is csv"),
        ({"logger_name": "n"}, "logger_name needs a logger"),
    ],
)
def test_what_a_logger_cannot_show_is_refused(changes, message):
    """In one sentence, where the definition is made."""
    with pytest.raises(DefinitionError, match=message):
        Learn(**changes)


def test_weights_and_biases_has_one_run_with_its_hyperparameters(tmp_path, monkeypatch):
    """Offline: start and resume have one id, and the first has every field of the definition."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for steps in (2, 3):
        changes = {"learn__logger": "wandb", "learn__steps": str(steps), "learn__logger_project": "ours"}
        changes |= {"learn__logger_name": "first", "learn__logger_tags": "a,b", "learn__logger_samples": "3"}
        run(pipeline(**changes), run_dir=tmp_path / "run", resume=steps > 2)
        assert wandb.run.config["learn.steps"] == steps
        assert wandb.run.config["collect.group_size"] == 4
        assert (wandb.run.project, wandb.run.name, wandb.run.tags) == ("ours", "first", ("a", "b"))
        assert wandb.run.summary["samples"]["nrows"] == 3
        ids.append(wandb.run.id)
        wandb.finish()
    assert ids[0] == ids[1] == (tmp_path / "run" / "logs" / "wandb-id.txt").read_text()


def test_a_missing_logger_is_reported_with_the_command(tmp_path, monkeypatch):
    """Without its library the message has the command that installs it."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    events: list[Event] = []
    with pytest.raises(DefinitionError, match="pip install mlflow"):
        with_logger(Setup(pipeline=pipeline(learn__logger="mlflow")), RunFolder(tmp_path), events.append)
    with pytest.raises(DefinitionError, match=r"Learn\.logger is 'cvs'\. Did you mean 'csv'"):
        Learn(logger="cvs")  # pyright: ignore[reportArgumentType]
