from __future__ import annotations

import functools
import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhf_pipeline import CausalLMPolicy, scratch_policy
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.learner.lora import AdaptersOff, add_adapters, write_unnamed_base
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.build import build_policy
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import newest, tiny
from trajectory_store import TrajectoryStore

pipeline = functools.partial(
    tiny,
    policy__lora_rank="4", write__kl_coef="0.1", loss__entropy_coeff="0", learn__steps="4", learn__lr="5e-2",
)  # fmt: skip


def policy_of(**options):
    policy = scratch_policy("0123456789=", hidden_size=16, num_layers=2, num_heads=2, seed=0)
    add_adapters(policy, **{"rank": 4, "alpha": 8.0, "targets": "all-linear", "seed": 0, **options})
    return policy


def test_peft_missing_is_reported_with_the_command(monkeypatch):
    """Without peft the message names what to install, and what to set to go on without."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DefinitionError, match=r"pip install peft\. Or set policy\.lora_rank=0"):
        policy_of()


def test_a_moving_reference_and_adapters_exclude_each_other():
    """The reference of a LoRA policy is the policy itself, so it cannot move."""
    with pytest.raises(DefinitionError, match=r"Set learn\.reference_every=0 or policy\.lora_rank=0\."):
        pipeline(learn__reference_every="1")


def test_only_the_adapters_learn_and_the_head_has_none():
    """The base weights and the head are frozen, so that their gradients are never formed."""
    pytest.importorskip("peft")
    policy = policy_of()
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert not policy.head_weight.requires_grad
    assert sum("lm_head" in name for name in trained) == 0
    again = policy_of()
    for a, b in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_reference_is_the_model_with_its_adapters_off():
    """Before a step both agree; after one the policy has moved and the reference has not, and gradients still flow."""
    pytest.importorskip("peft")
    policy = policy_of()
    reference = AdaptersOff(policy)
    ids = torch.randint(2, 12, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    base = scratch_policy("0123456789=", hidden_size=16, num_layers=2, num_heads=2, seed=0).log_probs(ids, mask)
    assert torch.equal(reference.log_probs(ids, mask), base)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):  # the second matrices start at zero
        policy.log_probs(ids, mask).sum().backward()
        optimizer.step()
    assert torch.equal(reference.log_probs(ids, mask), base)
    assert not torch.allclose(policy.log_probs(ids, mask), base, atol=1e-3)
    assert not reference.log_probs(ids, mask).requires_grad
    assert policy.log_probs(ids, mask).requires_grad


def test_names_of_modules_are_checked():
    """Targets that are not there are answered with those that are."""
    pytest.importorskip("peft")
    with pytest.raises(DefinitionError, match=r"linear modules of this model are .*q_proj"):
        policy_of(targets="query")
    policy = policy_of(targets="q_proj, v_proj")
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, p in policy.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's call
def test_a_run_from_scratch_is_recomputed_from_its_folder(tmp_path):
    """A checkpoint has the model that its adapters belong to: both give the log-probs that the run stored."""
    peft = pytest.importorskip("peft")
    run(pipeline(learn__epochs="1", learn__checkpoint_every="1", learn__keep_checkpoints="9"), run_dir=tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000003"
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    scratch = pipeline_policy_weights()
    assert all(torch.equal(tensor, scratch[name]) for name, tensor in base.state_dict().items())
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        ids = store.ids()
        rows = store.read(ids[store.read_scalars("policy_version", ids) == 3])
    assert len(rows["input_ids"])
    for tokens, mask, stored in zip(rows["input_ids"], rows["assistant_mask"], rows["log_probs"], strict=True):
        row = torch.tensor(tokens[None], dtype=torch.int64)
        with torch.no_grad():
            scores = torch.log_softmax(adapted(row).logits[0, :-1], -1).gather(1, row[0, 1:, None])[:, 0]
        produced = torch.from_numpy(mask[1:].astype(bool))
        torch.testing.assert_close(scores[produced], torch.tensor(stored[1:])[produced], atol=1e-5, rtol=0)


def pipeline_policy_weights():
    """Return the weights that the pipeline's seed draws."""
    return build_policy(pipeline(policy__lora_rank="0"), seed=0, device="cpu").model.state_dict()


def test_a_base_with_a_path_is_named_and_not_copied(tmp_path):
    """A pretrained model is where `adapter_config.json` says, and a checkpoint has no copy of it."""
    pytest.importorskip("peft")
    scratch_policy("0123456789=", hidden_size=16, num_layers=1, num_heads=2).save_pretrained(tmp_path / "model")
    policy = CausalLMPolicy.from_pretrained(tmp_path / "model")
    add_adapters(policy, rank=2, alpha=8.0, targets="all-linear", seed=0)
    (tmp_path / "checkpoint").mkdir()
    write_unnamed_base(policy, policy.model.state_dict(), tmp_path / "checkpoint")
    policy.save_pretrained(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / "base").exists()
    config = json.loads((tmp_path / "checkpoint" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "model")


def test_a_run_with_adapters_resumes_bit_for_bit(tmp_path):
    """Checkpoints hold adapters only; stopped and resumed, they equal the straight run's byte for byte."""
    pytest.importorskip("peft")
    run(pipeline(), run_dir=tmp_path / "straight")
    run(pipeline(learn__steps="3"), run_dir=tmp_path / "run")
    run(pipeline(), run_dir=tmp_path / "run", resume=True)
    files = [newest(tmp_path / name) / "adapter_model.safetensors" for name in ("straight", "run")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all("lora_" in name for name in load_file(files[0]))
    assert any(bool(tensor.any()) for name, tensor in load_file(files[0]).items() if "lora_B" in name)
    assert not (newest(tmp_path / "run") / "model.safetensors").exists()
    assert [finding.text for finding in check_run(RunFolder.open(tmp_path / "run")) if not finding.ok] == []
    with TrajectoryStore.open(tmp_path / "run" / "store") as store:
        ids = store.ids()
        rows = store.read_ragged("ref_log_probs", ids)
        own = store.read_ragged("log_probs", ids)
        mask = store.read_ragged("assistant_mask", ids).values.astype(bool)
        first = store.read_scalars("policy_version", ids) == 0
    token_is_first = first.repeat(rows.lengths)
    # Untrained adapters add nothing, so the first rollout's reference is its own policy.
    gap = abs(rows.values - own.values)
    assert gap[mask & token_is_first].max() < 1e-5
    assert gap[mask & ~token_is_first].max() > 1e-3
