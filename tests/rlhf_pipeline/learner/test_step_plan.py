from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline import (
    GRPOLoss,
    Learn,
    MCAdvantage,
    Pipeline,
    Sample,
    TrajectoryReplayBuffer,
    scratch_policy,
)
from rlhf_pipeline.buffer.samplers import as_sampler
from rlhf_pipeline.config import Strategy
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.learner.step_plan import UseCounts, sampler_of
from rlhf_pipeline.run.ledger import Ledger
from rlhf_pipeline.run.rerun import plan_rerun, rerun
from rlhf_pipeline.run.rows import StepRows
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import tiny, trajectory


def last_two(number: int, version: int, log_prob: float) -> TensorDict:
    return trajectory(number, [0, 1, 1], float(number % 2), version, tokens=[1, 2, number % 10], log_prob=log_prob)


@pytest.fixture
def make_learner(tmp_path):
    buffers = []

    def make(sample: Sample, *, max_staleness: int = 8, log_probs=(-2.0,) * 4) -> Learner:
        """A learner over 16 trajectories, four of each of the versions 0 to 3."""
        buffer = TrajectoryReplayBuffer(
            storage=tmp_path / f"store-{len(buffers)}", transform=MCAdvantage(2, estimator="dr_grpo")
        )
        buffers.append(buffer)
        rows = [last_two(n, n // 4, log_probs[n // 4]) for n in range(16)]
        buffer.extend(lazy_stack(rows))
        policy = scratch_policy("0123456789", hidden_size=16, num_layers=1, num_heads=2, seed=0)
        return Learner(
            policy=policy,
            loss=GRPOLoss(policy),
            buffer=buffer,
            config=Learn(token_budget=12),
            max_staleness=max_staleness,
            max_completion_tokens=2,
            ledger=Ledger(tmp_path / f"ledger-{len(buffers)}.jsonl"),
            seed=3,
            sample=sample,
            batch_size=6,
        )

    yield make
    for buffer in buffers:
        buffer.trajectories.close()


def drawn(learner: Learner, step: int) -> list[int]:
    row_ids, ages, *_ = learner.chosen_rows(step)
    assert (step - 1 - learner.buffer.store.read_scalars("policy_version", row_ids) == ages).all()
    return learner.buffer.store.read_scalars("trajectory_id", row_ids).tolist()


def test_a_mix_takes_its_part_from_the_newest_rollout(make_learner):
    """Half of six from version 3, which has four trajectories; the rest from what remains."""
    learner = make_learner(Sample(strategy="mix", fresh_fraction=0.5))
    found = drawn(learner, 4)
    assert sum(number >= 12 for number in found) >= 3
    assert len(set(found)) == 6


def test_a_use_limit_counts_what_the_ledger_says(make_learner):
    """With two uses at most, 16 trajectories fill five batches of six and a rest of two, after a restart too."""
    learner = make_learner(Sample(strategy="uniform", max_uses=2), max_staleness=99)
    sizes = [int(learner.step(step)["num_trajectories"]) for step in range(4, 7)]
    learner.ledger = Ledger(learner.ledger.rows.path)
    sizes += [int(learner.step(step)["num_trajectories"]) for step in range(7, 10)]
    assert sizes == [6, 6, 6, 6, 6, 2]
    used = np.concatenate([row["row_ids"] for row in learner.ledger.rows])
    assert np.bincount(used, minlength=16).tolist() == [2] * 16
    with pytest.raises(DataError, match=r"has been used 2 times. Raise sample\.max_uses"):
        learner.step(10)


def test_the_guard_lets_good_batches_pass(make_learner):
    """Stale trajectories whose log-probs are near those of the policy count in full, and nothing is said."""
    learner = make_learner(Sample(strategy="uniform", batch_size=16, min_ess=0.5, skip_below_ess=0.5))
    assert learner.step(4)["ess_weight"] == 1.0
    assert learner.take_notices() == []


def test_the_guard_weighs_ages_apart(make_learner):
    """Log-probs of one version scattered over orders of magnitude: only that version counts less, and it is said."""
    sample = Sample(strategy="uniform", batch_size=16, min_ess=0.9, skip_below_ess=0.5)
    learner = make_learner(sample)
    # Version 1 once more, one of four with a ratio that carries everything.
    rows = [last_two(n, 1, -12.0 if n == 16 else -0.1) for n in range(16, 20)]
    learner.buffer.extend(lazy_stack(rows))
    learner.sample = dataclasses.replace(sample, batch_size=20)
    learner.batch_size = 20
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    found = learner.step(4)
    (notice,) = learner.take_notices()
    assert "step 4: Age 2: the effective sample size of 8 trajectories is" in notice
    assert "they are excluded" in notice
    assert found["ess_weight"] == pytest.approx(12 / 20)
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_a_batch_of_nothing_but_stale_noise_changes_nothing(make_learner):
    """Every trajectory left out: the step is recorded, and no weight moves, whatever the optimizer remembers."""
    learner = make_learner(Sample(strategy="uniform", batch_size=4, min_ess=0.9, skip_below_ess=0.9), max_staleness=99)
    learner.step(55)  # gives the optimizer something to remember
    learner.take_notices()
    rows = [last_two(n, 50, -12.0 if n == 16 else -0.1) for n in range(16, 20)]
    learner.buffer.extend(lazy_stack(rows))
    learner.max_staleness = 10
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    found = learner.step(56)
    assert (found["ess_weight"], found["num_trajectories"]) == (0.0, 4)
    assert "they are excluded" in learner.take_notices()[0]
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def replaying(**sample) -> Pipeline:
    pipeline = tiny(buffer__max_staleness="6", learn__steps="8", learn__keep_checkpoints="9", loss__entropy_coeff="0")
    return dataclasses.replace(pipeline, sample=Sample(**sample))


@pytest.mark.parametrize("sample", [{"strategy": "mix", "tau": 3.0, "min_ess": 0.3}, {"strategy": "uniform"}])
def test_a_run_with_replay_resumes_and_is_taken_again_bit_for_bit(tmp_path, sample):
    """Stopped half-way and resumed it ends at the straight run's weights; the choice is made again from the store."""
    pipeline = replaying(**sample)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    run(pipeline, run_dir=straight)
    run(dataclasses.replace(pipeline, learn=dataclasses.replace(pipeline.learn, steps=4)), run_dir=broken)
    run(pipeline, run_dir=broken, resume=True)
    batches = [[row["trajectory_ids"] for row in StepRows(folder / "ledger.jsonl")] for folder in (straight, broken)]
    assert batches[0] == batches[1]
    assert all(len(batch) == 12 for batch in batches[0])
    weights = [
        (folder / "checkpoints" / "step-00000008" / "model.safetensors").read_bytes() for folder in (straight, broken)
    ]
    assert weights[0] == weights[1]
    plan = plan_rerun(straight, from_step=3)
    assert all(one.ok for one in rerun(pipeline, plan, seed=0, device="cpu"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "recency"}, "needs tau"),
        ({"strategy": "unifrom"}, "Did you mean 'uniform'"),
        ({"strategy": "mix", "fresh_fraction": 1.5}, "between 0 and 1"),
        ({"min_ess": 0.05}, "between skip_below_ess"),
        ({"min_ess": 0.0}, "above 0"),
        ({"max_uses": 0}, "at least 1"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(fields, message):
    """Each rule of `Sample` names the value and the limit."""
    with pytest.raises(DefinitionError, match=message):
        Sample(**fields)


def test_fresh_takes_the_whole_rollout():
    """A batch size beside it would be ignored, so it is refused."""
    with pytest.raises(DefinitionError, match=r"into learn\.minibatches parts, so sample\.batch_size cannot be set"):
        replaying(batch_size=8)


NAMES: tuple[str, ...] = get_args(Strategy)


def settings_of_sampler(sampler) -> dict[str, object]:
    """What a strategy is set to, that of its parts included."""
    found = {name: value for name, value in vars(sampler).items() if isinstance(value, (int, float, str, type(None)))}
    parts = {name: settings_of_sampler(value) for name, value in vars(sampler).items() if hasattr(value, "select")}
    return {"kind": type(sampler).__name__, **found, **parts}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_the_same_in_a_definition_and_in_a_program(name):
    """A strategy's class and its settings, those of its parts included, by either door."""
    tau = {"tau": 8.0} if name == "recency" else {}
    sample = Sample(strategy=name, max_uses=3, **tau)
    one = sampler_of(sample, max_staleness=5, steps_per_rollout=2 if name == "anchored" else 1)
    other = as_sampler(name, max_staleness=5, max_uses=3, **tau)
    assert settings_of_sampler(one) == settings_of_sampler(other)
    assert one.seed == 0


@pytest.mark.parametrize("name", ["fresh", "priority", "mix", "uniform"])
def test_a_step_of_a_definition_is_the_step_of_a_program(make_learner, name):
    """The learner's choice is that of `select_step` with the strategy's name, the seed and the learner's version."""
    learner = make_learner(Sample(strategy=name), max_staleness=8)
    rows = learner.chosen_rows(4).row_ids
    size = None if name == "fresh" else learner.batch_size
    chosen = learner.buffer.select_step(4, size, strategy=name, seed=3, version=3)
    assert sorted(chosen.tolist()) == sorted(rows.tolist())


def test_use_counts_miss_no_step_that_was_passed_over(tmp_path):
    """Asked for step 2 and then for step 5, the counts hold what steps 2 to 4 used."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for step in range(1, 6):
        ledger.record({"step": step, "row_ids": [0], "trajectory_ids": [7, 7 + step]})
    counts = UseCounts(ledger)
    asked = np.array([7, 8, 9, 10, 11, 12])
    assert counts.before(2, asked).tolist() == [1, 1, 0, 0, 0, 0]
    assert counts.before(5, asked).tolist() == [4, 1, 1, 1, 1, 0]
    assert counts.before(3, asked).tolist() == [2, 1, 1, 0, 0, 0]
