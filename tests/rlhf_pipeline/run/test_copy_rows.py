"""Gathering: what is chosen from stores, copied as it is or completed, and where it is from."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from rlhf_pipeline import KLRewardTransform, MCAdvantage, Replay, RetrieveLogProb, TrajectoryReplayBuffer
from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema
from rlhf_pipeline.data.keys import ATTENTION_MASK
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.exchange import export_store, import_files
from rlhf_pipeline.run import selection as sources
from rlhf_pipeline.run.build import build_policy
from rlhf_pipeline.run.copy_rows import Gatherer, gather_schema
from rlhf_pipeline.run.events import ignore_events
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.replay_stores import limits_of
from rlhf_pipeline.run.selection import Choice, Limits, choose
from tests.rlhf_pipeline.small import VOCABULARY, make_store, offline
from trajectory_store import Column, TrajectoryStore, copy_rows, diff

LIMITS = Limits(vocabulary=VOCABULARY, positions=None)


def gathered(pipeline, path: Path, *, stop_often: bool = False) -> TrajectoryStore:
    """Gather what a pipeline chooses into a new store, in one go or with a stop after every batch."""
    policy = build_policy(pipeline, seed=0, device="cpu")
    choice = choose(pipeline.replay, LIMITS)
    store = TrajectoryStore.create(path, gather_schema(choice))
    while True:
        gatherer = Gatherer(pipeline, policy, choice, store, limits=LIMITS, on_event=ignore_events)
        before = len(store)
        if gatherer.run(lambda before=before: stop_often and len(store) > before) is not None:
            return store


def bits_of(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_what_lacks_nothing_is_copied_bit_for_bit(tmp_path):
    """Every column of every row, those that only this store has too, NaN included."""
    source = make_store(tmp_path / "source", extra=True)
    before = bits_of(source)
    with gathered(offline(source), tmp_path / "own") as own, TrajectoryStore.open(source) as given:
        rows = own.read_scalars("source_row")
        assert own.read_scalars("source").tolist() == [0] * 12
        for column in given.schema:
            if column.axis is None or column.is_text:
                left, right = own.read_scalars(column.name), given.read_scalars(column.name, rows)
                assert np.array_equal(left, right, equal_nan=column.np_dtype.kind == "f" and not column.is_text)
            else:
                left, right = own.read_ragged(column.name), given.read_ragged(column.name, rows)
                assert left.values.tobytes() == right.values.tobytes()
            if column.optional and column.name in ("advantage", "kl_coef"):
                assert own.present(column.name).tolist() == given.present(column.name, rows).tolist()
        assert own.read_scalars("computed").tolist() == [0] * 12
    assert bits_of(source) == before


def test_missing_log_probs_are_those_of_the_initial_policy(tmp_path):
    """Against a log-softmax in float64 over the logits, one trajectory at a time."""
    source = make_store(tmp_path / "source", lacks=("log_probs", "ref_log_probs", "advantage"))
    pipeline = offline(source, write__kl_coef="0.1")
    policy = build_policy(pipeline, seed=0, device="cpu")
    model = policy.model.double()
    with gathered(pipeline, tmp_path / "own") as own:
        found = own.read(own.ids(), ["input_ids", "assistant_mask", "log_probs", "ref_log_probs"])
        for tokens, mask, scores, reference in zip(*found.values(), strict=True):
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0].double()
            every = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0].numpy()
            assert np.allclose(scores[1:][mask[1:]], every[mask[1:]], atol=1e-5)
            assert np.isnan(scores[~mask]).all()
            assert np.array_equal(scores, reference, equal_nan=True)
        assert own.read_scalars("computed").tolist() == [7] * 12


@pytest.mark.parametrize("kl_coef", ["0", "0.5"])
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "opo"])
def test_advantages_are_those_of_the_write_path(tmp_path, estimator, kl_coef):
    """The same bits as `extend` through RetrieveLogProb, KLRewardTransform and MCAdvantage gives."""
    rewards = [0.0, 1.0, 1.0, 0.25] * 3
    source = make_store(tmp_path / "source", lacks=("log_probs", "ref_log_probs", "advantage"), rewards=rewards)
    pipeline = offline(source, write__estimator=estimator, write__kl_coef=kl_coef)
    policy = build_policy(pipeline, seed=0, device="cpu")
    coef = float(kl_coef)
    parts: list[Any] = [MCAdvantage(4, estimator=estimator)]
    parts += [KLRewardTransform(coef=coef)] if coef else []
    parts += [RetrieveLogProb(policy, behaviour_model=policy)]
    buffer = TrajectoryReplayBuffer(storage=tmp_path / "written", transform=Compose(*parts))
    with TrajectoryStore.open(source) as given:
        storage = TrajectoryReplayBuffer(storage=given).trajectories
        wanted = ["tokens", "masks", "task_reward", "group_id", "num_prompt_tokens", "trajectory_id"]
        batch = storage.read(row_ids=given.ids(), keys=["input_ids", "assistant_mask", ATTENTION_MASK, *wanted[2:]])
        buffer.extend(batch.select(*wanted, strict=False))
    with gathered(pipeline, tmp_path / "own") as own:
        for name in ("advantage", "return", "degenerate"):
            assert own.read_scalars(name).tolist() == buffer.store.read_scalars(name).tolist()
        ours, theirs = own.read_ragged("log_probs").values, buffer.store.read_ragged("log_probs").values
        assert np.array_equal(ours, theirs, equal_nan=True)
    buffer.trajectories.close()


@pytest.mark.parametrize("estimator", ["reinforce_pp", "reinforce_pp_baseline"])
def test_the_batch_of_an_advantage_is_all_that_was_gathered(tmp_path, estimator):
    """Two stores, gathered in as many commits as there may be: the spread is that of all trajectories together."""
    rewards = [0.0, 1.0, 1.0, 0.25, 1.0, 1.0, 1.0, 1.0, 0.0, 0.5, 0.5, 0.0]
    first = make_store(tmp_path / "first", lacks=("advantage",), rewards=rewards)
    second = make_store(tmp_path / "second", lacks=("advantage",), rewards=[3.0 * reward for reward in rewards])
    pipeline = offline(first, second, write__estimator=estimator)
    with gathered(pipeline, tmp_path / "own", stop_often=True) as own:
        returns = own.read_scalars("task_reward").astype(np.float64)
        groups = own.read_scalars("group_id")
        mean = returns.mean()
        if "baseline" in estimator:
            mean = np.array([returns[groups == group].mean() for group in groups])
        centred = returns - mean
        assert own.read_scalars("advantage") == pytest.approx(centred / centred.std(ddof=1), rel=1e-6)
        assert not np.any(own.read_scalars("degenerate")) or "baseline" in estimator


def test_a_group_is_completed_whole_where_one_member_lacks_something(tmp_path):
    """One trajectory without an advantage: its group gets new ones, by hand; the other group keeps its own."""
    source = make_store(tmp_path / "source", groups=(2, 2), rewards=[1.0, 0.0, 1.0, 0.0])
    with TrajectoryStore.open(source, "a") as given:
        given.update(given.ids()[:1], advantage=[math.nan])
        kept = given.read_scalars("advantage")[2:].tolist()
    with gathered(offline(source), tmp_path / "own") as own:
        assert own.read_scalars("advantage").tolist() == [0.5, -0.5, *kept]
        assert own.read_scalars("computed").tolist() == [4, 4, 0, 0]


def test_filters_leave_part_of_a_group_and_the_advantage_is_over_that_part(tmp_path):
    """Of rewards 0, 0.5, 1 the ones above 0: mean 0.75; alone in its group: 0 and degenerate."""
    source = make_store(
        tmp_path / "source", groups=(3, 3), lacks=("advantage",), rewards=[0.0, 0.5, 1.0, 0.0, 0.0, 1.0]
    )
    with gathered(offline(source, replay={"filters": ("reward>0",)}), tmp_path / "own") as own:
        assert own.read_scalars("advantage").tolist() == [-0.25, 0.25, 0.0]
        assert own.read_scalars("degenerate").tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("rule", "left", "priorities"), [("keep", 4, [1] * 4), ("mark", 4, [0, 0, 1, 1]), ("drop", 2, [1, 1])]
)
def test_groups_without_spread(tmp_path, rule, left, priorities):
    """They are kept, marked with priority 0, or dropped, as the write path is told."""
    source = make_store(tmp_path / "source", groups=(2, 2), lacks=("advantage",), rewards=[1.0, 1.0, 1.0, 0.0])
    with gathered(offline(source, write__zero_variance=rule), tmp_path / "own") as own:
        assert len(own) == left
        assert own.read_scalars("priority").tolist() == priorities


def test_all_groups_dropped_is_an_error(tmp_path):
    """Nothing but groups without spread, and `drop`: there is nothing to learn from."""
    source = make_store(tmp_path / "source", groups=(2, 2), lacks=("advantage",), rewards=[1.0] * 4)
    with pytest.raises(DataError, match="nothing to learn from"):
        gathered(offline(source, write__zero_variance="drop"), tmp_path / "own")


def test_several_stores_share_no_ids(tmp_path):
    """Ids that collide are shifted; where a row is from stays known, whatever the backend of its store."""
    first = make_store(tmp_path / "first", groups=(2, 2))
    second = make_store(tmp_path / "second", groups=(3,), seed=1, backend="zarr")
    with gathered(offline(first, second), tmp_path / "own") as own:
        assert own.read_scalars("trajectory_id").tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert own.read_scalars("group_id").tolist() == [0, 0, 1, 1, 2, 2, 2]
        assert own.read_scalars("source").tolist() == [0] * 4 + [1] * 3
        rows = own.read_scalars("source_row")[4:]
        with TrajectoryStore.open(second) as given:
            assert given.read(rows, ["completion"]) == own.read(own.ids()[4:], ["completion"])


def test_groups_are_brought_together_and_rows_without_ids_get_their_own(tmp_path):
    """Members that arrived apart come one after another; a row without a group is a group of one."""
    source, mixed = make_store(tmp_path / "source", groups=(2, 2, 1)), tmp_path / "mixed"
    with TrajectoryStore.open(source) as given, TrajectoryStore.create(mixed, given.schema) as store:
        batch = given.read_batch(given.ids()[[0, 2, 1, 4, 3]])
        batch.values["group_id"][3] = batch.values["trajectory_id"][3] = -1
        store.append_batch(batch)
    with gathered(offline(mixed), tmp_path / "own") as own:
        assert own.read_scalars("group_id").tolist() == [0, 0, 1, 1, 2]
        assert own.read_scalars("trajectory_id").tolist() == [0, 1, 2, 3, 4]


def test_rows_without_a_reward_or_stored_again_are_left_out_and_counted(tmp_path):
    """A NaN reward is never learned from; of a trajectory that was stored twice, the newest row is taken."""
    rewards = [math.nan, 1.0, 0.0, 1.0]
    source = make_store(tmp_path / "source", groups=(2, 2), rewards=rewards)
    with TrajectoryStore.open(source, "a") as store:
        copy_rows(store, store, store.ids()[2:3])
    choice = choose(Replay(stores=(str(source),)), LIMITS)
    assert len(choice) == 3
    assert (choice.sources[0].num_ungraded, choice.sources[0].num_repeated) == (1, 1)
    assert choice.trajectory_id.tolist() == [1, 3, 2]


def test_trajectory_ids_that_start_again_in_each_group_are_numbered_through(tmp_path):
    """They name no row by themselves; none is taken for another group's trajectory stored again."""
    source, numbered = make_store(tmp_path / "source", groups=(2, 2)), tmp_path / "numbered"
    with TrajectoryStore.open(source) as given, TrajectoryStore.create(numbered, given.schema) as store:
        batch = given.read_batch(given.ids())
        batch.values["trajectory_id"][:] = [0, 1, 0, 1]
        store.append_batch(batch)
    choice = choose(Replay(stores=(str(numbered),)), LIMITS)
    assert choice.trajectory_id.tolist() == [0, 1, 2, 3]
    assert choice.sources[0].num_repeated == 0


def test_columns_that_do_not_fit_are_named(tmp_path):
    """An advantage per token, and two stores with one column of two types."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    make_store(first)
    for path, column in (
        (second, Column("advantage", "float32", ragged=True, fill=0.0)),
        (third, Column("kl_coef", "float64", fill=0.0)),
    ):
        columns = [column if known.name == column.name else known for known in trajectory_schema()]
        with TrajectoryStore.create(path, columns) as store:
            store.append({"input_ids": [[1, 2]], "assistant_mask": [[False, True]], "task_reward": [1.0]})
    with pytest.raises(
        DataError,
        match=r"'advantage' of .*second contains one float32 value per token; learning .* one float32 value per tr",
    ):
        gather_schema(choose(Replay(stores=(str(second),)), LIMITS))
    with pytest.raises(DataError, match=r"'kl_coef' contains one float32 .* in .*first and one float64 .* in .*third"):
        gather_schema(choose(Replay(stores=(str(first), str(third))), LIMITS))


def test_a_column_that_a_source_defines_otherwise_can_be_normalised(tmp_path):
    """Advantages of all trajectories together are updates, also where a source has float64 ones that keep theirs."""
    first, other = make_store(tmp_path / "first", lacks=("advantage",)), tmp_path / "other"
    fixed = Column("advantage", "float64", fill=math.nan)
    with TrajectoryStore.open(first) as given:
        columns = [fixed if known.name == fixed.name else known for known in given.schema]
        with TrajectoryStore.create(other, columns) as store:
            batch = given.read_batch(given.ids())
            batch.values.pop("advantage", None)
            batch.values |= {fixed.name: np.full(batch.n_rows, math.nan)}
            store.append_batch(batch)
    found = []
    for name, source in (("plain", first), ("own", other)):
        pipeline = offline(source, write__estimator="reinforce_pp")
        with gathered(pipeline, tmp_path / name) as own:
            found.append(own.read_scalars("advantage").astype(np.float32).tolist())
            assert not np.isnan(found[-1]).any()
    assert found[0] == found[1]


def test_a_stop_after_every_batch_changes_nothing(tmp_path, monkeypatch):
    """Batches of at most four rows, stopped after each: the same rows, in the same order, as in one go."""
    monkeypatch.setattr(sources, "BATCH_ROWS", 4)  # thousands of rows would be scored by a model
    groups = (3, 2, 4, 1, 1, 6, 2)
    source = make_store(tmp_path / "source", groups=groups, lacks=("log_probs", "advantage"))
    pipeline = offline(source, write__zero_variance="drop")
    assert np.diff(choose(pipeline.replay, LIMITS).ends, prepend=0).tolist() == [3, 2, 4, 2, 6, 2]
    with (
        gathered(pipeline, tmp_path / "straight") as straight,
        gathered(pipeline, tmp_path / "stopped", stop_often=True) as stopped,
    ):
        assert 0 < len(straight) < sum(groups)
        assert str(diff(straight, stopped)) == "The stores contain the same rows."


def test_the_choice_is_written_down(tmp_path):
    """What was chosen is read back as it was, though the store has grown since."""
    source = make_store(tmp_path / "source", groups=(2, 2))
    choice = choose(Replay(stores=(str(source),)), LIMITS)
    run = RunFolder(tmp_path)
    assert Choice.load(run) is None
    choice.save(run)
    with TrajectoryStore.open(source, "a") as store:
        copy_rows(store, store, store.ids())
    found = Choice.load(run)
    assert found is not None
    assert found.row.tolist() == choice.row.tolist()
    assert found.sources == choice.sources
    assert len(choose(Replay(stores=(str(source),)), LIMITS).row) == 4


def test_a_source_that_lost_a_chosen_trajectory_is_named(tmp_path):
    """Evicted between the choice and the copy."""
    source = make_store(tmp_path / "source", groups=(2, 2))
    pipeline = offline(source)
    choice = choose(pipeline.replay, LIMITS)
    policy = build_policy(pipeline, seed=0, device="cpu")
    with TrajectoryStore.create(tmp_path / "own", gather_schema(choice)) as own:
        choice.row[0] = 10**6
        gatherer = Gatherer(pipeline, policy, choice, own, limits=LIMITS, on_event=ignore_events)
        with pytest.raises(DataError, match="no longer contains some of the trajectories that this run selected"):
            gatherer.run(lambda: False)


@pytest.mark.parametrize(
    ("replay", "error", "words"),
    [
        ({"filters": ("reward>5", "version<3")}, DataError, r"12 stored, 0 after 'reward>5', 0 after 'version<3'"),
        ({"filters": ("num_tokens<=6", "rewrad>0")}, DefinitionError, "Did you mean 'reward'"),
        ({"stores": ()}, DefinitionError, "no store to learn from"),
        ({"stores": ("SOURCE", "SOURCE")}, DefinitionError, "is listed twice"),
        ({"stores": ("nowhere",)}, MissingPathError, "no run or store at nowhere"),
    ],
)
def test_what_cannot_be_chosen_is_reported(tmp_path, replay, error, words):
    """Each condition with how many were left after it, a wrong name with the nearest one, a store by its path."""
    source = str(make_store(tmp_path / "source"))
    stores = tuple(source if name == "SOURCE" else name for name in replay.get("stores", ("SOURCE",)))
    with pytest.raises(error, match=words):
        choose(Replay(**{**replay, "stores": stores}), LIMITS)


def test_a_policy_that_cannot_read_the_store_is_refused_before_anything_is_made(tmp_path):
    """Token ids beyond its vocabulary, trajectories beyond its positions; the message says what to type."""
    source = make_store(tmp_path / "source", vocabulary=40)
    replay = Replay(stores=(str(source),))
    with pytest.raises(DataError, match=r"contains the token id \d+, but the policy's vocabulary has 13 tokens"):
        choose(replay, LIMITS)
    with pytest.raises(DataError, match=r"--filter 'num_tokens<=5'"):
        choose(replay, Limits(vocabulary=40, positions=5))
    policy = build_policy(offline(source), seed=0, device="cpu")
    assert limits_of(policy).vocabulary == VOCABULARY


def test_a_store_that_does_not_say_what_the_policy_produced_is_refused(tmp_path):
    """Without marked tokens the steps learned nothing, and the run ended well."""
    unmarked = make_store(tmp_path / "unmarked", lacks=("assistant_mask",))
    with pytest.raises(DataError, match=r"assistant_mask, .* marks no token"):
        choose(Replay(stores=(str(unmarked),)), LIMITS)
    names = ["input_ids", "num_prompt_tokens", "task_reward"]
    export_store(unmarked, tmp_path / "part.jsonl", columns=names)
    import_files([tmp_path / "part.jsonl"], tmp_path / "part")
    with pytest.raises(DataError, match="lacks columns that learning requires: assistant_mask"):
        choose(Replay(stores=(str(tmp_path / "part"),)), LIMITS)


def test_rows_that_were_left_out_of_their_group_stay_out(tmp_path):
    """A group out of bounds is not learned from; a group that still waits is taken as it is."""
    buffer = TrajectoryReplayBuffer(storage=tmp_path / "store", transform=MCAdvantage(2, keep_return_bounds=(0.1, 0.9)))
    for number, (group, reward) in enumerate([(0, 0.0), (0, 1.0), (2, 0.0), (2, 0.0), (1, 1.0)]):
        row = {"tokens": {"full": torch.arange(4)}, "num_prompt_tokens": torch.tensor(2)}
        row |= {"group_id": torch.tensor(group), "task_reward": torch.tensor(reward)}
        buffer.extend(TensorDict({**row, "trajectory_id": torch.tensor(number)}))
    buffer.storage.close()
    choice = choose(Replay(stores=(str(tmp_path / "store"),)), LIMITS)
    assert choice.trajectory_id.tolist() == [0, 1, 4]
