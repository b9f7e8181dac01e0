"""TorchRL's GRPO recipe on this package: the lines that change, and what comes out."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # its own, at import
    import torchrl.collectors.llm  # noqa: F401

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing transforms:FutureWarning"),
    pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated:UserWarning"),
]
RECIPE = Path(__file__).with_name("grpo_sync.py")
CHANGES: dict[str, str | None] = {
    "from torchrl.envs.llm.transforms import KLRewardTransform": (
        "from rlhf_pipeline import GRPOLoss, KLRewardTransform, MCAdvantage, TrajectoryReplayBuffer, TrajectoryStorage"
    ),
    "from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage": (
        "from rlhf_pipeline.interop.torchrl import ChatTrajectories, as_policy"
    ),
    "    inference_policy = get_inference_model(cfg, make_model(), tokenizer)": (
        "    inference_policy = as_policy(get_inference_model(cfg, make_model(), tokenizer))"
    ),
    # Log-probs are at the sampling temperature here, so what scores them has to know it.
    "        device=train_device,": "        device=train_device, temperature=cfg.inference_model.temperature,",
    '    options = {"input_mode": "tokens", "generate": False, "return_log_probs": True}': (
        '    options = {"input_mode": "tokens", "generate": False, '
        '"generate_kwargs": {"temperature": cfg.inference_model.temperature}}'
    ),
    "    rb = ReplayBuffer(": "    rb = TrajectoryReplayBuffer(",
    "        storage=LazyStackStorage(cfg.train.buffer_size or cfg.env.repeats * cfg.env.num_envs),": (
        '        storage=TrajectoryStorage(folder / "store", extra={("next", "step_count"): "int64", '
        '("next", "policy_version"): "int64"}),'
    ),
    "        transform=MCAdvantage(grpo_size=cfg.env.repeats),": (
        "        transform=Compose(MCAdvantage(grpo_size=cfg.env.repeats), ChatTrajectories()),"
    ),
    '                history: History = batch.view(-1)[0]["next", "history"].prompt': (
        '                history_str: Any = train_tokenizer.decode(batch["tokens", "full"][0])'
    ),
    "                history_str: Any = history.apply_chat_template(tokenizer=train_tokenizer)": None,
}
"""The recipe's lines that change, whole lines, and what they become; None goes."""


def changed() -> str:
    """The recipe with these lines."""
    lines = RECIPE.read_text(encoding="utf-8").splitlines()
    for old in CHANGES:
        assert lines.count(old) == 1, old
    new = [CHANGES.get(line, line) for line in lines]
    return "\n".join(line for line in new if line is not None)


def definition(*, kl: bool, in_loss: bool = False, reasoning: bool = False, **train: Any) -> SimpleNamespace:
    """The recipe's settings, small."""
    defaults = {
        "use_kl_to_ref": kl,
        "kl_coef_in_loss": in_loss,
        "kl_to_ref_coeff": 0.05,
        "kl_to_inference_coeff": 0.0,
        "entropy_coeff": 0.01,
        "epochs": 1,
        "gradient_accumulation_steps": 1,
        "logging_frequency": 1,
        "optim_batch_size": 4,
        "buffer_size": None,
        "dialog_turns_per_batch": 8,
        "total_dialog_turns": 32,
        "empty_replay_buffer": True,
    }
    return SimpleNamespace(
        train=SimpleNamespace(**{**defaults, **train}),
        env=SimpleNamespace(repeats=4, num_envs=2, reasoning=reasoning),
        inference_model=SimpleNamespace(max_tokens=6, temperature=0.9),
        optimizer=SimpleNamespace(lr=1e-3, weight_decay=0.0, clip_grad_norm=1.0),
    )


def run(source: str, tiny: Any, folder: Path, cfg: SimpleNamespace) -> Any:
    """Run a version of the recipe."""
    space: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(source, RECIPE.name, "exec"), space)
    tokenizer = tiny.tokenizer()
    return space["main"](cfg, folder, lambda: tiny.model(tokenizer, scale=1.0), tokenizer)


def test_at_most_ten_lines_change():
    """The recipe moves over by ten lines."""
    assert len(CHANGES) <= 10


@pytest.mark.parametrize(("kl", "in_loss"), [(False, False), (True, False), (True, True)])
def test_the_recipe_runs(tiny, tmp_path, kl, in_loss):
    """Without KL, with KL in the reward, with KL in the loss: figures are finite, and the model learns."""
    cfg = definition(kl=kl, in_loss=in_loss)
    out = run(changed(), tiny, tmp_path, cfg)
    assert len(out.logged) >= 3
    for row in out.logged:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["grad_norm"] > 0
        assert row["step_count_mean"] == 1.0
        assert row["seq_length_mean"] <= 6
        assert "what is" in row["history"]
    assert out.logged[0]["ESS"] == pytest.approx(1.0, abs=1e-5)  # the behaviour log-probs are those of the model
    assert ("loss_kl_to_ref" in out.logged[-1]) == in_loss
    start = tiny.model(tiny.tokenizer(), scale=1.0)
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), out.model.parameters(), strict=True))
    batch = out.buffer.read(out.buffer.store.ids())
    assert bool((batch["kl_coef"] == (0.05 if kl and not in_loss else 0.0)).all())
    assert (("next", "ref_log_probs", "full") in batch.keys(True)) == kl
    out.buffer.storage.close()


def test_the_step_is_that_of_the_loss_terms(tiny, tmp_path):
    """`loss.mean(reduce=True)` is the mean of the loss terms, whatever figures stand beside them."""
    source = changed().replace(
        "                loss_val.backward()\n",
        "                assert loss_val.item() == ((loss.loss_objective + loss.loss_entropy) / 2).item()\n"
        "                loss_val.backward()\n",
    )
    out = run(source, tiny, tmp_path, definition(kl=False, total_dialog_turns=16))
    assert out.logged
    out.buffer.storage.close()


@pytest.mark.parametrize("kl", [False, True])
def test_it_does_not_run_on_torchrl(tiny, tmp_path, kl):
    """Today: the day this passes, the recipe can be compared number by number."""
    with pytest.raises(KeyError):
        run(RECIPE.read_text(encoding="utf-8"), tiny, tmp_path, definition(kl=kl))
