from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from rlhf_pipeline import GRPOLoss, Learn, MCAdvantage, Sample, TrajectoryReplayBuffer, scratch_policy
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.errors import DataError, DefinitionError, MissingKeyError
from rlhf_pipeline.learner.learner import Learner
from rlhf_pipeline.learner.metrics import ModelCost
from rlhf_pipeline.run.ledger import Ledger
from rlhf_pipeline.run.rows import StepRows
from tests.moments import at_call
from tests.rlhf_pipeline.small import trajectory
from trajectory_store import Column, Schema


@pytest.fixture
def make_learner(tmp_path):
    buffers = []

    def make(budget: int, *, check_sampler: bool = False, sample=None, staleness: int = 0, **options) -> Learner:
        folder = tmp_path / f"store-{len(buffers)}"
        buffer = TrajectoryReplayBuffer(storage=folder, transform=MCAdvantage(2, estimator="dr_grpo"))
        buffers.append(buffer)
        policy = scratch_policy("0123456789", hidden_size=16, num_layers=1, num_heads=2, seed=0)
        return Learner(
            policy=policy,
            loss=GRPOLoss(policy, entropy_bonus=True, **options),
            buffer=buffer,
            config=Learn(token_budget=budget, peak_flops=1e12),
            max_staleness=staleness,
            max_completion_tokens=8,
            ledger=Ledger(tmp_path / f"ledger-{len(buffers)}.jsonl"),
            seed=0,
            check_sampler=check_sampler,
            sample=sample,
        )

    yield make
    for buffer in buffers:
        buffer.trajectories.close()


TURNS = [
    trajectory(0, [0, 0, 1, 1, 0, 0, 1, 1, 1], 1.0),  # two turns with another's tokens in between
    trajectory(1, [0, 0, 1], 0.0),
    trajectory(2, [0, 1, 1, 0, 1], 0.25),
    trajectory(3, [0, 1, 1, 1, 1, 1], 1.0),
]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "dr_grpo"])
def test_the_steps_loss_is_the_loss_of_the_whole_batch(make_learner, aggregation):
    """Split by a token budget or not, multi-turn or not, the step's loss is that of one undivided batch."""
    options = {"aggregation": aggregation}
    if aggregation == "dr_grpo":
        options["max_completion_tokens"] = 8
    for budget in (9, 4096):
        learner = make_learner(budget, **options)
        learner.buffer.extend(lazy_stack(TURNS))
        whole = learner.loss(learner.buffer.read(learner.buffer.store.ids())).total_loss().item()
        assert learner.step(1)["loss"] == pytest.approx(whole, rel=1e-5)


def test_the_ledger_names_what_was_used_before_the_weights_move(make_learner):
    """A step records its rows in the order of their trajectory ids, with ages and watermark."""
    learner = make_learner(4096)
    learner.buffer.extend(lazy_stack([TURNS[3], TURNS[2], TURNS[1], TURNS[0]]))
    learner.step(1)
    (row,) = learner.ledger.rows
    stored = learner.buffer.store.read_scalars("trajectory_id", row["row_ids"])
    assert stored.tolist() == [0, 1, 2, 3]
    assert (row["step"], row["ages"], row["watermark"]) == (1, [0, 0, 0, 0], 4)
    assert learner.take_notices() == []


def test_stale_trajectories_are_not_used(make_learner):
    """Only trajectories within the allowed age are learned from; with none left the error says what to do."""
    learner = make_learner(4096)
    learner.buffer.extend(lazy_stack(TURNS[:2]))
    fresh = [trajectory(2, [0, 1, 1], 0.0, version=1), trajectory(3, [0, 1], 1.0, version=1)]
    learner.buffer.extend(lazy_stack(fresh))
    learner.step(2)
    assert len(learner.ledger.rows[0]["row_ids"]) == 2
    with pytest.raises(
        DataError, match=r"trajectories in the store: 4\). Collect new rollouts, or raise buffer\.max_staleness"
    ):
        learner.step(9)


def test_rows_that_come_to_light_behind_others_are_learned_from(make_learner, tmp_path, monkeypatch):
    """A collector whose clock is late stores before rows that a learner has passed as too old; it learns from them."""
    learner = make_learner(4096)
    path, now = tmp_path / "shared", time.time_ns
    slow, quick = TrajectoryStorage(path, backend="zarr"), TrajectoryStorage(path)
    monkeypatch.setattr(time, "time_ns", lambda: now() - 10**12)
    slow.extend(lazy_stack([trajectory(0, [0, 1], 0.0)]))
    monkeypatch.setattr(time, "time_ns", now)
    for group in (1, 2, 3):
        quick.extend(lazy_stack([trajectory(group, [0, 1], 0.0, version=group)]))
    learner.buffer = TrajectoryReplayBuffer(storage=TrajectoryStorage(path, mode="r"))
    assert learner.chosen_rows(4).ages.tolist() == [0]
    monkeypatch.setattr(time, "time_ns", lambda: now() - 10**12)
    (late,) = slow.extend(lazy_stack([trajectory(4, [0, 1], 0.0, version=4)]))
    learner.buffer.refresh()
    assert learner.buffer.store.ids().tolist().index(slow.row_ids()[late]) == 1
    assert learner.chosen_rows(5).row_ids.tolist() == [slow.row_ids()[late]]
    for storage in (slow, quick, learner.buffer.trajectories):
        storage.close()


@pytest.mark.parametrize(("budget", "notices"), [(5, 0), (4, 1)])
def test_a_trajectory_longer_than_the_token_budget_is_mentioned(make_learner, budget, notices):
    """The longest has 5 tokens: a budget of 5 suffices, and one of 4 does not."""
    learner = make_learner(budget)
    learner.buffer.extend(lazy_stack([trajectory(0, [0, 1, 1, 1, 1], 1.0), trajectory(1, [0, 1], 0.0)]))
    learner.step(1)
    texts = [text for text in learner.take_notices() if "learn.token_budget" in text]
    assert len(texts) == notices
    assert all("a trajectory of 5 tokens is longer than learn.token_budget=4" in text for text in texts)


def test_a_step_that_differs_from_its_ledger_row_is_refused(make_learner):
    """What the ledger names is all there, and the step would take others: it stops, and ledger and weights stay."""
    learner = make_learner(4096)
    learner.buffer.extend(lazy_stack(TURNS[:2]))
    learner.step(1)
    learner.ledger = Ledger(learner.ledger.rows.path)  # as after a restart
    rows, before = list(learner.ledger.rows), [parameter.clone() for parameter in learner.policy.parameters()]
    learner.buffer.extend(lazy_stack(TURNS[2:]))
    with pytest.raises(
        DataError, match=r"the ledger lists 2 rows for step 1, .*but other trajectories would now be used"
    ):
        learner.step(1)
    assert list(StepRows(learner.ledger.rows.path)) == rows
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))


def test_a_step_whose_trajectories_were_lost_is_reported(make_learner):
    """A power loss or eviction took what the ledger names: the step takes others, and a notice says so."""
    learner = make_learner(4096)
    learner.buffer.extend(lazy_stack(TURNS[:2]))
    learner.ledger.record({"step": 1, "row_ids": [99], "trajectory_ids": [99], "ages": [0]})
    learner.step(1)
    (notice,) = learner.take_notices()
    assert "step 1 uses different trajectories than before the restart" in notice
    assert learner.take_notices() == []


def test_groups_without_spread_take_a_step_without_gradient(make_learner):
    """All advantages zero and no entropy bonus: the step counts, the weights stay."""
    learner = make_learner(4096)
    learner.loss.entropy_bonus = False
    learner.buffer.extend(lazy_stack([trajectory(0, [0, 1], 1.0), trajectory(1, [0, 1, 1], 1.0)]))
    before = [parameter.clone() for parameter in learner.policy.parameters()]
    metrics = learner.step(1)
    assert metrics["num_trajectories"] == 2
    assert metrics["padding_efficiency"] is None
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert metrics["num_taught"] == 0
    assert learner.ledger.rows[-1]["no_gradient"] == learner.ledger.rows[-1]["row_ids"]


@pytest.mark.parametrize("bonus", [False, True])
def test_the_ledger_reports_what_taught_nothing_and_what_was_left_out(make_learner, bonus):
    """By the gradient, not by the rewards: an entropy bonus moves equal rewards too; what failed is counted apart."""
    learner = make_learner(4096)
    learner.loss.entropy_bonus = bonus
    rewards = (1.0, 0.0, 1.0, 1.0, 1.0, math.nan)  # groups of two
    learner.buffer.extend(lazy_stack([trajectory(number, [0, 1, 1], reward) for number, reward in enumerate(rewards)]))
    metrics, row = learner.step(1), learner.ledger.rows[-1]
    assert (metrics["num_trajectories"], metrics["num_groups"], metrics["num_taught"]) == (5, 3, 5 if bonus else 2)
    assert row["no_gradient"] == ([] if bonus else row["row_ids"][2:])
    assert row["left_out"] == {"failed": 1}
    lengths, scored, cost = torch.full((5,), 3), torch.full((5,), 2), ModelCost.of(learner.policy)
    flops = cost.flops(lengths, scored) if bonus else cost.flops(lengths[:2], scored[:2])
    flops += 0 if bonus else cost.flops(lengths[2:], scored[2:], backward=False)
    assert metrics["mfu"] * metrics["update_s"] * 1e12 == pytest.approx(flops)


@pytest.mark.parametrize("layout", ["packed", "prefix_shared"])
def test_layouts_do_not_change_what_is_learned(make_learner, layout):
    """Rows end to end, or with a group's prompt computed once: the loss and the gradient of padded rows."""
    losses, norms = [], []
    for name in ("padded", layout):
        learner = make_learner(24)
        learner.config = dataclasses.replace(learner.config, layout=name)
        learner.policy.scoring_layout = name
        learner.buffer.extend(lazy_stack(TURNS))
        metrics = learner.step(1)
        losses.append(metrics["loss"])
        norms.append(metrics["grad_norm"])
        assert learner.take_notices() == []
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert metrics["padding_efficiency"] >= 1.0


def test_a_learner_without_a_ledger_records_nothing(make_learner):
    """For a replay: the step is computed, and nothing is written."""
    learner = make_learner(4096)
    learner.buffer.extend(lazy_stack(TURNS))
    path = learner.ledger.rows.path
    learner.ledger = None
    assert learner.step(1)["num_trajectories"] == 4
    assert not path.exists()
    with pytest.raises(DefinitionError, match="records nothing"):
        _ = learner.ledger


def test_the_trainers_own_log_probs_correct_the_sampler(make_learner):
    """With a cap of 1 on a sampler that was too sure, each token is weighted by exp(trainer - sampler), by hand."""
    plain, capped = make_learner(4096), make_learner(4096, decoupled=True, tis_cap=1.0)
    for learner in (plain, capped):
        learner.loss.entropy_bonus = False
        learner.buffer.extend(lazy_stack(TURNS))  # sampled at -2.0, and scored at about -2.5
    batch = capped.buffer.read(capped.buffer.store.ids())
    mask = batch["masks", "all_assistant_mask"]
    with torch.no_grad():
        own = capped.policy.log_probs(batch["tokens", "full"], batch["masks", "all_attention_mask"], mask)
    weight = (own - batch["log_probs", "full"]).exp().clamp(max=1.0)
    by_hand = -(weight * batch["advantage"])[mask].mean()  # the ratio to the proximal policy is 1
    metrics = capped.step(1)
    assert metrics["loss"] == pytest.approx(by_hand.item(), rel=1e-5)
    assert metrics["loss"] != pytest.approx(plain.step(1)["loss"], rel=1e-2)
    assert metrics["kl_approx"] == pytest.approx(0.0, abs=1e-6)


def test_a_sampler_that_disagrees_with_the_policy_is_reported_once(make_learner):
    """Fresh trajectories whose log-probs are not the policy's give one notice with both figures."""
    learner = make_learner(4096, check_sampler=True)
    learner.buffer.extend(lazy_stack(TURNS))
    learner.step(1)
    (notice,) = learner.take_notices()
    assert "the sampled log-probs differ from the scored ones" in notice
    assert "loss.tis_cap" in notice
    learner.step(1)
    assert learner.take_notices() == []


def spread_out(versions: int = 1) -> list[TensorDict]:
    """Eight trajectories in four groups, half of them without spread, sampled at log-probs unlike the policy's."""
    masks = [[0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 1], [0, 1, 1, 1, 1], [0, 1], [0, 1, 1, 1], [0, 0, 1], [0, 1, 1]]
    rewards = [1.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    rows = [
        trajectory(n, mask, reward, n % versions) for n, (mask, reward) in enumerate(zip(masks, rewards, strict=True))
    ]
    for n, row in enumerate(rows):
        noise = torch.randn(len(masks[n]), generator=torch.Generator().manual_seed(n))
        row["log_probs", "full"] = row["log_probs", "full"] - 0.4 + 0.5 * noise
    return rows


FIGURES = ("clip_fraction", "clip_fraction_low", "clip_fraction_high", "kl_approx", "ess", "ess_sequence")


@pytest.mark.parametrize("budget", [6, 9, 14, 4096])
def test_the_figures_are_those_of_all_trajectories_of_the_step(make_learner, budget):
    """Trajectories without an advantage count in every figure, however the step is cut, and only there."""
    learner = make_learner(budget)
    learner.loss.entropy_bonus = False
    learner.buffer.extend(lazy_stack(spread_out()))
    with torch.no_grad():
        whole = learner.loss(learner.buffer.read(learner.buffer.store.ids()))
    metrics = learner.step(1)
    names = {**{name: name for name in FIGURES}, "ess": "ESS"}
    more = {name: name for name in ("entropy", "kl_to_inference", "sampler_gap")}
    for name, field in (names | more).items():
        assert metrics[name] == pytest.approx(whole.get(field).item(), rel=1e-5, abs=1e-7), name
    assert metrics["num_scored_tokens"] == whole.num_tokens.item() == 20
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["ess_sequence"] < 0.99


CHOICES = [{"top_entropy_quantile": 0.3}, {"clip_cov": 0.5, "clip_cov_bounds": (-5.0, 5.0)}]


@pytest.mark.parametrize("options", CHOICES, ids=["top entropy", "clip-cov"])
def test_which_tokens_keep_their_loss_does_not_depend_on_the_split(make_learner, options):
    """The choice is among all tokens of the step, those without an advantage included; its gradient is one batch's."""
    weights, figures, kept = [], [], []
    for budget in (6, 9, 4096):
        learner = make_learner(budget, **options)
        learner.policy.double()
        learner.buffer.extend(lazy_stack(spread_out()))
        plan = learner._choose_tokens(learner._plan(learner.chosen_rows(1).row_ids), 1)
        rows = [*plan.batches, *plan.measured]
        counts = {int(at): k for part in rows for at, k in zip(part, plan.parts[int(part[0])].keep.sum(1), strict=True)}
        kept.append([int(counts[at]) for at in range(len(counts))])
        figures.append(learner.step(1))
        weights.append(torch.cat([p.detach().flatten() for p in learner.policy.parameters()]))
    # 20 tokens: 6 above the quantile at 0.7 of the way; or all but 10 drawn.
    assert kept[0] == kept[1] == kept[2]
    assert sum(kept[0]) == (6 if "top_entropy_quantile" in options else 10)
    for other, of_other in zip(weights[1:], figures[1:], strict=True):
        assert of_other["loss"] == pytest.approx(figures[0]["loss"], rel=1e-6)
        assert of_other["grad_norm"] == pytest.approx(figures[0]["grad_norm"], rel=1e-5)
        assert (other - weights[0]).abs().max() < 1e-5
    plain = make_learner(4096)
    plain.policy.double()
    plain.buffer.extend(lazy_stack(spread_out()))
    assert plain.step(1)["grad_norm"] != pytest.approx(figures[0]["grad_norm"], rel=1e-2)


def trained(learner, steps):
    return [learner.step(step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("options", [{"tis_cap": 2.0}, {"icepop": (0.1, 10.0)}])
def test_the_clip_works_where_the_sampler_is_corrected(make_learner, options):
    """The ratio is against the policy before the first step on a trajectory: later steps on it are clipped."""
    learner = make_learner(12, decoupled=True, **options)
    learner.max_staleness = 8
    learner.loss.entropy_bonus = False
    learner.config = dataclasses.replace(learner.config, lr=2e-2)
    learner.buffer.extend(lazy_stack(spread_out()))
    ids = learner.buffer.store.ids()
    batch = learner.buffer.read(ids)
    tokens, attention, mask = (
        batch["tokens", "full"],
        batch["masks", "all_attention_mask"],
        batch["masks", "all_assistant_mask"],
    )
    with torch.no_grad():
        before = learner.policy.log_probs(tokens, attention, mask).double()
    first, *later = trained(learner, 3)
    assert first["kl_approx"] == pytest.approx(0.0, abs=1e-6)
    assert first["clip_fraction"] == 0.0
    with torch.no_grad():
        now = learner.policy.log_probs(tokens, attention, mask).double()
    gap = (now - before)[mask]
    fourth = learner.step(4)
    assert fourth["kl_approx"] == pytest.approx(-gap.mean().item(), rel=1e-4)
    assert fourth["ess"] == pytest.approx(
        (gap.exp().sum() ** 2 / (len(gap) * gap.exp().square().sum())).item(), rel=1e-5
    )
    assert max(row["clip_fraction"] for row in (*later, fourth)) > 0.05


def test_a_resumed_learner_keeps_the_proximal_policy(make_learner, tmp_path):
    """Saved in the middle of a phase and loaded, the next steps are those of a learner that went on, bit for bit."""

    def make():
        learner = make_learner(12, decoupled=True, tis_cap=2.0)
        learner.max_staleness = 8
        learner.config = dataclasses.replace(learner.config, lr=1e-2)
        learner.buffer.extend(lazy_stack(spread_out()))
        return learner

    straight, killed, resumed = make(), make(), make()
    trained(straight, 4)
    trained(killed, 2)
    folder = tmp_path / "state"
    folder.mkdir()
    killed.write(folder)
    resumed.read(folder)
    for step in (3, 4):
        metrics = resumed.step(step)
    for a, b in zip(straight.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert metrics["kl_approx"] != 0.0


@pytest.mark.parametrize("options", [{"tis_cap": 2.0}, {"icepop": (0.1, 10.0)}])
def test_a_phase_of_minibatches_is_scored_at_its_first_step(make_learner, tmp_path, options):
    """Steps on parts of a rollout share the weights of the phase's start, and a resume at any of them repeats the bits.

    The first figure of each step is by hand: the mean of `scored before the phase - scored before the step`.
    """

    def make():
        sample = Sample(strategy="uniform", batch_size=2, max_uses=1)
        learner = make_learner(12, decoupled=True, sample=sample, staleness=8, **options)
        learner.loss.entropy_bonus = False
        learner.config = dataclasses.replace(learner.config, lr=2e-2)
        learner.buffer.extend(lazy_stack(spread_out()))
        return learner

    straight = make()
    batch = straight.buffer.read(straight.buffer.store.ids())
    mask = batch["masks", "all_assistant_mask"]

    def score(learner):
        with torch.no_grad():
            return learner.policy.log_probs(batch["tokens", "full"], batch["masks", "all_attention_mask"], mask)

    before, found = score(straight), []
    for step in (1, 2, 3, 4):
        gap = before - score(straight)
        used = straight.chosen_rows(step).row_ids
        found.append(straight.step(step))
        by_hand = gap[torch.from_numpy(used)][mask[torch.from_numpy(used)]].mean()
        assert found[-1]["kl_approx"] == pytest.approx(by_hand.item(), rel=1e-4, abs=1e-6)
        folder = tmp_path / f"step-{step}"
        folder.mkdir()
        straight.write(folder)
    assert abs(found[-1]["kl_approx"]) > 1e-3
    for saved in (1, 2, 3):
        resumed = make()
        resumed.ledger = straight.ledger
        resumed.read(tmp_path / f"step-{saved}")
        again = [resumed.step(step) for step in range(saved + 1, 5)]
        assert [row["loss"] for row in again] == [row["loss"] for row in found[saved:]]
        for a, b in zip(straight.policy.parameters(), resumed.policy.parameters(), strict=True):
            assert torch.equal(a, b)


def test_trajectories_that_are_too_old_are_forgotten(make_learner):
    """What the proximal policy scored is dropped as soon as no step may ask for it."""
    learner = make_learner(4096, decoupled=True, tis_cap=2.0)
    learner.buffer.extend(lazy_stack(spread_out()))
    learner.step(1)
    assert len(learner._proximal.row_ids()) == 8
    learner.buffer.extend(lazy_stack([trajectory(20, [0, 1, 1], 0.0, 1), trajectory(21, [0, 1], 1.0, 1)]))
    learner.step(2)
    assert learner._proximal.row_ids().tolist() == [8, 9]


@pytest.mark.parametrize("kl", [None, 0.1])
def test_a_proximal_log_prob_that_is_not_finite_leaves_the_step(make_learner, kl):
    """A token that the policy now bans is left out of loss and counts, and is counted in the metrics, once.

    With a KL term, the reference has no log-prob of it either.
    """
    learner = make_learner(12, decoupled=True, tis_cap=2.0, kl_to_ref_coeff=kl)
    learner.loss.entropy_bonus = False
    banned, rows = 3, spread_out()
    if kl:
        for row in rows:
            tokens = row["tokens", "full"]
            row["next", "ref_log_probs", "full"] = torch.where(tokens == banned, torch.nan, -1.0)
    learner.buffer.extend(lazy_stack(rows))
    head = learner.policy.model.lm_head
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[banned] = -torch.inf
    metrics = learner.step(1)
    batch = learner.buffer.read(learner.buffer.store.ids())
    lost = int((batch["tokens", "full"] == banned)[batch["masks", "all_assistant_mask"]].sum())
    assert lost > 0
    assert metrics["num_unscored_tokens"] == lost
    assert metrics["num_scored_tokens"] == 20 - lost
    assert torch.isfinite(torch.tensor(metrics["grad_norm"]))


def test_the_kl_to_the_sampler_pulls_on_trajectories_without_an_advantage(make_learner):
    """With a KL term against the behaviour policy every trajectory has a gradient."""
    learner = make_learner(12, kl_to_inference_coeff=1.0)
    learner.loss.entropy_bonus = False
    learner.buffer.extend(lazy_stack(spread_out()[2:4] + spread_out()[6:8]))
    metrics = learner.step(1)
    assert metrics["grad_norm"] > 0
    assert metrics["loss_kl_to_inference"] > 0
    assert metrics["loss"] == pytest.approx(metrics["loss_kl_to_inference"], rel=1e-6)


@pytest.mark.parametrize("options", [{"reduction": "sum"}, {"reduction": "none"}, {"aggregation": "none"}])
def test_a_reduction_that_fixed_weights_would_override_is_refused(make_learner, options):
    """The learner weighs tokens itself: a loss that sums or does not reduce is named, with what to write instead."""
    with pytest.raises(DefinitionError, match="sequence_sum"):
        make_learner(4096, **options)


def test_the_mismatch_is_judged_by_its_size(make_learner):
    """Log-probs that are off up as much as down are reported, though their mean is small; exact ones are not."""
    quiet, loud = make_learner(4096, check_sampler=True), make_learner(4096, check_sampler=True)
    for learner, error in ((quiet, 0.0), (loud, 1e-3)):
        rows = spread_out()
        for row in rows:
            mask = row["masks", "all_assistant_mask"]
            with torch.no_grad():
                own = learner.policy.log_probs(row["tokens", "full"][None], torch.ones_like(mask)[None])[0]
            sign = torch.where(torch.arange(len(mask)) % 2 == 0, 1.0, -1.0)
            row["log_probs", "full"] = torch.where(mask, own + error * sign, torch.nan)
        learner.buffer.extend(lazy_stack(rows))
        metrics = learner.step(1)
        assert metrics["sampler_gap"] == pytest.approx(error, abs=1e-6)
        assert bool(learner.take_notices()) is (learner is loud)


def test_trajectories_without_an_id_are_all_learned_from(make_learner, tmp_path):
    """Rows that share the fill of `trajectory_id` are not one trajectory, in a step and in the counts of uses."""
    learner = make_learner(100)
    learner.buffer.extend(lazy_stack([row.exclude("trajectory_id") for row in TURNS]))
    assert learner.step(1)["num_trajectories"] == len(TURNS)
    learner.max_staleness = None
    learner.ledger = Ledger(tmp_path / "ledger-1.jsonl")
    again = learner.step(2, row_ids=learner.buffer.trajectories.mapped_rows()[:2])
    assert (again["num_trajectories"], again["use_count"]) == (2, 2.0)


def test_a_row_without_a_reference_leaves_the_step_whatever_the_split(make_learner):
    """Alone in its micro-batch, as among others: its tokens leave the KL loss, and the step is taken."""
    rows = [row.clone() for row in TURNS]
    for i, row in enumerate(rows):
        scores = torch.where(row["masks", "all_assistant_mask"], -2.5, torch.nan)
        row["next", "ref_log_probs", "full"] = scores if i != 1 else torch.full_like(scores, torch.nan)
    found = []
    for budget in (1, 100):
        learner = make_learner(budget, kl_to_ref_coeff=0.1)
        learner.buffer.extend(lazy_stack(rows))
        found.append(learner.step(1))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"])
    assert found[0]["grad_norm"] == pytest.approx(found[1]["grad_norm"])


@pytest.mark.parametrize("scored", [0, 1])
def test_the_references_column_is_read_if_a_row_has_it(make_learner, scored):
    """One row with a reference is enough, in whichever micro-batch; without any, the column of NaN is not made."""
    rows = [row.clone() for row in TURNS]
    for row in rows[:scored]:
        row["next", "ref_log_probs", "full"] = torch.where(row["masks", "all_assistant_mask"], -2.5, torch.nan)
    learner = make_learner(9)
    for row in rows:
        learner.buffer.extend_raw(lazy_stack([row.clone()]).update({"advantage": torch.ones(1)}))
    with at_call(TrajectoryStorage.columns) as reads:
        figures = learner.step(1)
    assert len(reads) > 1
    assert {learner.loss.tensor_keys.ref_log_probs in read.arguments["keys"] for read in reads} == {bool(scored)}
    assert (figures["kl_k1"] is not None) == bool(scored)


def test_a_gradient_that_rewards_overflow_names_the_rewards(make_learner):
    """Rewards near the largest float32 are not answered with advice about the learning rate."""
    learner = make_learner(4096)
    learner.buffer.extend(lazy_stack([trajectory(n, [0, 1, 1], -1e38 * n) for n in range(2)]))
    with pytest.raises(
        DataError, match=r"is not finite .* The advantages of this step reach 5\.0e\+37: use smaller rewards"
    ):
        learner.step(1)


def test_a_row_without_an_advantage_is_named_before_the_model_runs(make_learner):
    """One among others that have one, as after a write that went past MCAdvantage."""
    learner = make_learner(4096)
    learner.buffer.extend(lazy_stack(TURNS[:2]))
    learner.buffer.trajectories.extend(lazy_stack(TURNS[2:3]))
    bare = learner.buffer.store.ids()[-1]
    with pytest.raises(MissingKeyError, match=rf"row {bare} has no 'advantage', which MCAdvantage writes"):
        learner.step(1)


def test_an_advantage_per_token_is_refused_before_a_step(make_learner, tmp_path):
    """A learner takes one advantage per trajectory, and says so where the store has one per token."""
    like, other = make_learner(4096), [c for c in trajectory_schema() if c.name != "advantage"]
    schema = Schema([*other, Column("advantage", "float32", ragged=True, fill=float("nan"))])
    buffer = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "ragged", schema=schema))
    with pytest.raises(DefinitionError, match="has an advantage per token, but a learner needs one per trajectory"):
        Learner(
            policy=like.policy,
            loss=like.loss,
            buffer=buffer,
            config=Learn(),
            max_staleness=0,
            max_completion_tokens=8,
            ledger=None,
            seed=0,
        )
    buffer.trajectories.close()
