from __future__ import annotations

import pickle

import pytest
import torch
import torch.multiprocessing as mp
from tensordict import lazy_stack
from torch.utils.data import DataLoader
from torchrl.checkpoint import Checkpoint
from torchrl.data.replay_buffers import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import ConsumingSampler as TorchRLConsumingSampler
from torchrl.data.replay_buffers.samplers import PromptGroupSampler, RandomSampler, SamplerWithoutReplacement
from torchrl.data.replay_buffers.samplers import StalenessAwareSampler as TorchRLStaleness
from torchrl.data.replay_buffers.writers import (
    ImmutableDatasetWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
)
from torchrl.envs import Compose

from rlhf_pipeline import KLRewardTransform, keys
from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.samplers import ConsumingSampler, StalenessAwareSampler
from rlhf_pipeline.buffer.storage import TrajectoryStorage, collated
from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.transforms.mc_advantage import MCAdvantage
from tests.processes import PRELOADED
from trajectory_store import BatchError

KINDS = [ReplayBuffer, TensorDictReplayBuffer, TrajectoryReplayBuffer]


@pytest.fixture
def make(tmp_path, make_rows):
    """Buffers over a new storage each, with eight trajectories of four groups."""
    made = []

    def build(kind=TrajectoryReplayBuffer, *, rows=8, text=False, storage=None, **kwargs):
        if storage is None:
            storage = TrajectoryStorage(tmp_path / f"store{len(made)}", text=text)
        made.append(storage)
        rb = kind(storage=storage, **kwargs)
        if rows:
            rb.extend(lazy_stack(make_rows([4 + i % 3 for i in range(rows)])))
        return rb

    yield build
    for storage in made:
        storage.close()


def pickled(thing):
    """What another process would get."""
    return pickle.loads(pickle.dumps(thing))  # noqa: S301


def drawn(rb, count):
    """The trajectories of some samples, in order; each row is checked against the storage."""
    found = []
    for _ in range(count):
        batch = rb.sample()
        for i, row in enumerate(batch[keys.TRAJECTORY_ID].tolist()):
            n = 4 + row % 3
            want = rb.storage.get(row)[keys.TOKENS]
            assert batch[keys.TOKENS][i, :n].tolist() == want.tolist()
            assert batch[keys.TOKENS][i, n:].tolist() == [0] * (batch[keys.TOKENS].shape[1] - n)
            found.append(row)
    return found


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_uniform_samplers(make, kind, prefetch):
    """TorchRL's two uniform samplers reach every row; without replacement each comes once an epoch."""
    rb = make(kind, sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=prefetch)
    assert sorted(drawn(rb, 2)) == list(range(8))
    rb = make(kind, sampler=RandomSampler(), batch_size=4, prefetch=prefetch)
    assert set(drawn(rb, 24)) == set(range(8))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("strategy", ["random", "recency", "reward", "variance"])
def test_prompt_groups(make, kind, prefetch, strategy):
    """TorchRL's group sampler finds whole groups through the scalars of a slice, whatever its strategy."""
    sampler = PromptGroupSampler(num_groups=2, group_key="group_id", strategy=strategy, reward_key=keys.TASK_REWARD)
    rb = make(kind, sampler=sampler, batch_size=4, prefetch=prefetch)
    for _ in range(3):
        rows = drawn(rb, 1)
        assert len({row // 2 for row in rows}) == 2
        assert len(set(rows)) == 4


def test_prompt_groups_by_text(make):
    """Groups named by their prompt need a storage that reads text."""
    rb = make(sampler=PromptGroupSampler(num_groups=2, group_key="prompt"), batch_size=4, text=True)
    batch = rb.sample()
    assert sorted(batch["prompt"]) == sorted(f"prompt {g}" for g in batch[keys.GROUP_ID].tolist())
    assert len(set(batch["prompt"])) == 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_torchrl_staleness_with_older_data(make, kind):
    """TorchRL's own staleness sampler works as long as no row is newer than the learner."""
    sampler = TorchRLStaleness(max_staleness=2)
    sampler.consumer_version = 4
    rb = make(kind, sampler=sampler, batch_size=4)
    assert len(set(drawn(rb, 1))) == 4
    sampler.consumer_version = 6
    with pytest.raises(RuntimeError, match="exceed max_staleness"):
        rb.sample()


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_staleness_with_newer_data(make, kind, version):
    """TorchRL's sampler fails where rows are one version ahead; ours counts them as fresh."""
    theirs = TorchRLStaleness()
    theirs.consumer_version = 2
    with pytest.raises(RuntimeError, match="inf"):
        make(sampler=theirs, batch_size=4).sample()
    sampler = StalenessAwareSampler(max_staleness=0)
    sampler.consumer_version = version
    rb = make(kind, sampler=sampler, batch_size=8)
    assert sorted(drawn(rb, 1)) == list(range(8))
    assert sampler.sample(rb.storage, 3)[1]["staleness"].tolist() == [0.0, 0.0, 0.0]


def test_staleness_frequencies(make, make_rows):
    """First picks follow `1 / (staleness + 1)`, or the weights that are given; version -1 is no limit."""
    rb = make(rows=0)
    rows = make_rows([4] * 4)
    for i, row in enumerate(rows):
        row["policy_version"] = torch.tensor(i)
    rb.extend(lazy_stack(rows))
    for weigh, chances in ((None, [1 / 4, 1 / 3, 1 / 2, 1.0]), (lambda s: (s > 1).float(), [1.0, 1.0, 0.0, 0.0])):
        sampler = StalenessAwareSampler(-1, weigh)
        sampler.consumer_version = 3
        found = torch.bincount(torch.cat([sampler.sample(rb.storage, 1)[0] for _ in range(1500)]), minlength=4)
        expected = 1500 * torch.tensor(chances) / sum(chances)
        assert ((found - expected).abs() <= 5 * expected.sqrt()).all()
    sampler.increment_consumer_version()
    again = StalenessAwareSampler()
    again.load_state_dict(sampler.state_dict())
    assert again.consumer_version == 4
    with pytest.raises(DataError, match="staleness_weight_fn"):
        StalenessAwareSampler(None, lambda s: -1.0 - s).sample(rb.storage, 2)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_consuming(make, make_rows, kind, prefetch):
    """Each trajectory as often as allowed and not once more; new ones go on; rows stay where they are."""
    rb = make(kind, sampler=ConsumingSampler(2), batch_size=4, prefetch=prefetch)
    found = [row for batch in rb for row in batch[keys.TRAJECTORY_ID].tolist()]
    assert sorted(found) == sorted([*range(8), *range(8)])
    with pytest.raises(DataError, match="max_uses=2"):
        rb.sample()
    assert len(rb) == 8
    rb.extend(lazy_stack(make_rows([4, 5], first_group=4)))
    assert rb.sample()[keys.TRAJECTORY_ID].sort().values.tolist() == [8, 9]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iteration_ends_with_what_is_consumed(make, prefetch):
    """`for batch in rb` gives every trajectory once, the last batch with what is left."""
    rb = make(sampler="consuming", batch_size=3, prefetch=prefetch)
    batches = [batch[keys.TRAJECTORY_ID].tolist() for batch in rb]
    assert [len(batch) for batch in batches] == [3, 3, 2]
    assert sorted(row for batch in batches for row in batch) == list(range(8))


def test_consumed_is_remembered(make):
    """The count lives in the store: a later process goes on where this one ended."""
    rb = make(sampler=ConsumingSampler(), batch_size=5)
    first = drawn(rb, 1)
    again = TrajectoryStorage(rb.store.path)
    other = make(rows=0, storage=again, sampler=pickled(rb.sampler), batch_size=5)
    assert sorted(first + other.sample()[keys.TRAJECTORY_ID].tolist()) == list(range(8))
    assert other.sampler.ran_out


def consume(path, seed, start, answers):
    """In another process: take everything there is, in batches of three, and say which rows those were."""
    torch.set_num_threads(1)
    storage = TrajectoryStorage(path)
    sampler = ConsumingSampler(2, seed=seed)
    found = []
    start.wait(120)
    while True:
        try:
            index, _ = sampler.sample(storage, 3)
        except DataError:
            break
        found += storage.row_ids(index).tolist()
    answers.put(found)
    storage.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_two_processes_consume_one_store(tmp_path, children, make_rows, backend):
    """Every trajectory exactly as often as allowed, whoever takes it."""
    storage = TrajectoryStorage(tmp_path / "store", backend=backend)
    count = 120 if backend == "memmap" else 12
    storage.set(torch.arange(count), lazy_stack(make_rows([4] * count)))
    answers, start = PRELOADED.Queue(), PRELOADED.Barrier(2)
    workers = [children.call(consume, tmp_path / "store", seed, start, answers) for seed in range(2)]
    found = [answers.get(timeout=250) for _ in workers]
    for worker in workers:
        worker.succeed()
    assert sorted(found[0] + found[1]) == sorted([*storage.row_ids().tolist()] * 2)
    storage.refresh()
    assert storage[:]["use_count"].tolist() == [2] * count
    storage.close()


def test_consumers_in_turn(make, make_rows):
    """Two handles on one store: what one has taken, the other does not get, and it sees what the other wrote."""
    rb = make(sampler=ConsumingSampler(), batch_size=5)
    again = TrajectoryStorage(rb.store.path)
    other = make(rows=0, storage=again, sampler=ConsumingSampler(seed=9), batch_size=6)
    rb.extend(lazy_stack(make_rows([4, 5], first_group=4)))
    taken = rb.sample()[keys.TRAJECTORY_ID].tolist() + other.sample()[keys.TRAJECTORY_ID].tolist()
    assert sorted(taken) == list(range(10))
    assert rb.storage.store.verify().ok


def test_torchrl_consuming_is_refused_with_a_way_out(make):
    """TorchRL's own works on lists and tensors only."""
    with pytest.raises(DefinitionError, match=r"ConsumingSampler\(max_sample_count=3\)"):
        make(sampler=TorchRLConsumingSampler(3))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_dumps_and_loads(make, kind, tmp_path):
    """What TorchRL's buffers dump, a new buffer of the same kind loads."""
    rb = make(kind, batch_size=4)
    rb.dumps(tmp_path / "dump")
    other = make(kind, rows=0, batch_size=4)
    other.loads(tmp_path / "dump")
    assert other.storage[:][keys.TRAJECTORY_ID].tolist() == list(range(8))
    assert len(drawn(other, 2)) == 8


@pytest.mark.parametrize("what", ["buffer", "storage"])
@pytest.mark.parametrize("form", ["directory", "archive"])
def test_checkpoint(make, make_rows, tmp_path, what, form):
    """`torchrl.checkpoint.Checkpoint` brings back rows, texts, and the trajectories that wait for their group."""
    rb = make(transform=MCAdvantage(2), batch_size=4, sampler="uniform", seed=3)
    rb.extend(lazy_stack(make_rows([5], first_group=9)))
    rb.sample()
    component = rb if what == "buffer" else rb.storage
    Checkpoint(component=component).save(tmp_path / "checkpoint", format=form)
    other = make(rows=0, transform=MCAdvantage(2), batch_size=4, sampler="uniform", seed=3)
    result = Checkpoint(component=other if what == "buffer" else other.storage).load(tmp_path / "checkpoint")
    assert result.loaded == {"component"}
    mine = rb.read(rb.trajectories.row_ids(), text=True)
    theirs = other.read(other.trajectories.row_ids(), text=True)
    assert list(theirs["completion"]) == list(mine["completion"])
    for key in set(mine.keys(True, True)) - {keys.ROW_ID}:
        torch.testing.assert_close(theirs[key], mine[key], rtol=0, atol=0, equal_nan=True)
    if what == "buffer":
        assert other.transform[0].queued_trajectories == 1
        assert other.sample()["index"].tolist() == rb.sample()["index"].tolist()
        assert other.extend(lazy_stack(make_rows([5, 6], first_group=9)[1:])).tolist() == [8, 9]


def look(shared, answers):
    """In another process: what is there, and a draw."""
    torch.set_num_threads(1)
    storage = shared if isinstance(shared, TrajectoryStorage) else shared.storage
    storage.refresh()
    batch = storage.get([2, 0]) if shared is storage else shared.sample(4)
    answers.put((len(storage), batch[keys.TRAJECTORY_ID].tolist(), batch[keys.TOKENS].sum(1).tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.parametrize("what", ["buffer", "storage"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_sharing(make, make_rows, method, what):
    """Another process gets the storage, or the buffer with its generator, and sees all rows."""
    rb = make(seed=5, transform=MCAdvantage(2))
    shared = rb if what == "buffer" else rb.storage
    context = mp.get_context(method)
    answers = context.Queue()
    process = context.Process(target=look, args=(shared, answers))
    process.start()
    rows, found, sums = answers.get(timeout=250)
    process.join()
    assert process.exitcode == 0
    assert rows == 8
    assert found == (rb.sample(4)[keys.TRAJECTORY_ID].tolist() if what == "buffer" else [2, 0])
    assert sums == [int(rb.storage.get(i)[keys.TOKENS].sum()) for i in found]
    assert rb.extend(lazy_stack(make_rows([4, 5], first_group=7))).tolist() == [8, 9]


def test_pickled_buffer_continues(make, make_rows):
    """The copy draws what the original draws next, sees later rows, and has no second one of itself inside."""
    rb = make(seed=5, batch_size=4)
    rb.sample()
    copy = pickled(rb)
    assert copy.sample()["index"].tolist() == rb.sample()["index"].tolist()
    rb.extend(lazy_stack(make_rows([4, 5], first_group=7)))
    copy.refresh()
    assert len(copy) == 10
    assert copy.storage._attached_entities == [copy]
    assert pickled(rb.storage)._attached_entities == []
    copy.storage.close()


@pytest.mark.parametrize("batched", [True, False])
def test_data_loader_in_this_process(make, batched):
    """A map-style dataset: whole batches are read at once, single rows come without padding."""
    storage = make().storage
    if batched:
        loader = DataLoader(storage, batch_size=3, collate_fn=collated)
        batches = list(loader)
        assert [tuple(b.batch_size) for b in batches] == [(3,), (3,), (2,)]
        assert torch.cat([b[keys.TRAJECTORY_ID] for b in batches]).tolist() == list(range(8))
        assert torch.equal(batches[1][keys.TOKENS], storage.get([3, 4, 5])[keys.TOKENS])
    else:
        rows = list(DataLoader(storage, batch_size=None, collate_fn=collated))
        assert [len(row[keys.TOKENS]) for row in rows] == [4 + i % 3 for i in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_data_loader_with_workers(make, make_rows, method):
    """Workers read the same store; shuffled, every trajectory comes once an epoch; the writer goes on."""
    rb = make(text=True, transform=MCAdvantage(2))
    loader = DataLoader(
        rb.storage,
        batch_size=2,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        collate_fn=collated,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(1),
    )
    for _ in range(2):
        found = []
        for batch in loader:
            same = rb.read(batch[keys.ROW_ID], text=True)
            for key in (keys.TOKENS, keys.ADVANTAGE, keys.LOG_PROBS, keys.ATTENTION_MASK):
                assert torch.equal(batch[key], same[key])
            assert list(batch["completion"]) == list(same["completion"])
            found += batch[keys.ROW_ID].tolist()
        assert sorted(found) == sorted(rb.store.ids().tolist())
        rb.extend(lazy_stack(make_rows([4, 5], first_group=7)))
    del loader
    assert rb.storage.store.verify().ok
    assert len(rb) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_writes_reach_the_store(make, kind, tmp_path):
    """`set_`, `set_at_` and `update_` are seen by another reader of the store."""
    rb = make(kind)
    rb.set_("priority", torch.arange(8.0))
    rb.set_at_("priority", torch.tensor([20.0, 30.0]), [2, 3])
    rb.update_({"task_reward": torch.full((8,), 0.5), "degenerate": torch.ones(8, dtype=torch.bool)})
    rb.update_({"priority": torch.zeros(8), "advantage": torch.arange(8.0)}, keys_to_update=["advantage"])
    other = TrajectoryStorage(rb.storage.store.path, mode="r")[:]
    assert other["priority"].tolist() == [0.0, 1.0, 20.0, 30.0, 4.0, 5.0, 6.0, 7.0]
    assert other["task_reward"].tolist() == [0.5] * 8
    assert other["degenerate"].tolist() == [True] * 8
    assert other["advantage"].tolist() == list(range(8))


def test_keys_are_set_as_columns(make):
    """`rb["priority"] = ...` writes the column, in the slots' order; what is taken out of `rb[:]` is a copy."""
    rb = make()
    rb["priority"] = torch.arange(8.0)
    assert rb[:]["priority"].tolist() == list(range(8))
    taken = rb[:].clone()
    taken.set_("priority", torch.zeros(8))
    assert rb[:]["priority"].tolist() == list(range(8))
    assert pickled(rb[:])["priority"].tolist() == list(range(8))


@pytest.mark.parametrize("key", ["nothing", ("next", "reward"), keys.ROW_ID])
def test_what_no_column_holds_cannot_be_set(make, key):
    """The message names the columns; nothing is written."""
    rb = make()
    with pytest.raises(KeyError, match="not a column"):
        rb.set_(key, torch.zeros(8))
    with pytest.raises(DataError, match=r"storage\.update\(row_ids, ref_log_probs="):
        rb.set_(keys.REF_LOG_PROBS, torch.zeros(8))
    for key in (keys.LOG_PROBS, keys.GROUP_ID):
        with pytest.raises(BatchError, match=r"cannot be updated: only columns with mutable=True can"):
            rb.set_(key, torch.zeros(8))
    with pytest.raises(DataError, match="3 values for 8"):
        rb.set_("priority", torch.zeros(3))
    assert rb[:]["priority"].tolist() == [1.0] * 8


def test_a_writer_of_torchrl_keeps_its_meaning(make, make_rows, tmp_path):
    """A read-only buffer does not write; round robin goes on after what is there; a name is told its own argument."""
    filled = make()
    immutable = make(storage=filled.storage, rows=0, writer=ImmutableDatasetWriter())
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        immutable.extend(lazy_stack(make_rows([4])))
    assert len(filled) == 8
    turning = make(storage=filled.storage, rows=0, writer=TensorDictRoundRobinWriter)
    assert turning.extend(lazy_stack(make_rows([4, 5], first_group=9))).tolist() == [8, 9]
    with pytest.raises(DefinitionError, match="need no names"):
        make(storage=filled.storage, rows=0, writer="collector-0")
    with pytest.raises(DefinitionError, match="a trajectory store never overwrites rows"):
        make(storage=filled.storage, rows=0, writer=TensorDictMaxValueWriter(rank_key="task_reward"))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_torchrl_buffers_need_no_collate_fn(tmp_path, make_rows, kind):
    """A storage of trajectories gives batches that are ready, in TorchRL's own buffers too."""
    rb = kind(storage=TrajectoryStorage(tmp_path / "store"), batch_size=4)
    rb.extend(lazy_stack(make_rows([4, 5, 6])))
    assert rb.sample()[keys.TOKENS].shape[0] == 4
    assert rb[[0, 2]][keys.TOKENS].shape == (2, 6)
    rb.storage.close()


EXTRA = {"step_count": "int64", ("next", "step_count"): "int64", ("next", "score"): "float32", "note": "str"}


@pytest.fixture
def noted(make_rows):
    """Trajectories with keys that the schema does not know."""
    rows = make_rows([4, 5, 6, 7])
    for i, row in enumerate(rows):
        row["step_count"], row["next", "step_count"] = torch.tensor(i), torch.tensor([i + 1])
        row["next", "score"], row["note"] = torch.tensor(i / 2), f"note {i}"
    return rows


def test_further_keys_on_request(tmp_path, noted, to_form, form):
    """`extra` makes columns of them, in a new store and in one that exists; batches and views have them back."""
    TrajectoryStorage(tmp_path / "old").close()
    for name in ("new", "old"):
        rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / name, extra=EXTRA), batch_size=4)
        rb.extend(to_form(noted, form))
        batch = rb.read(rb.store.ids(), text=True)
        assert batch["step_count"].tolist() == [0, 1, 2, 3]
        assert batch["next", "step_count"].tolist() == [1, 2, 3, 4]
        assert batch["next", "score"].tolist() == [0.0, 0.5, 1.0, 1.5]
        assert list(batch["note"]) == [f"note {i}" for i in range(4)]
        assert rb[:]["next", "step_count"].tolist() == [1, 2, 3, 4]
        rb.set_(("next", "score"), torch.ones(4))
        assert rb.storage.get(2)["next", "score"].item() == 1.0
        rb.storage.close()
    with pytest.raises(DefinitionError, match="lacks these columns: note"):
        TrajectoryStorage(make_plain(tmp_path), mode="r", extra={"note": "str"})


def make_plain(folder):
    """The path of a store without further columns."""
    TrajectoryStorage(folder / "plain").close()
    return folder / "plain"


def test_what_is_not_kept_is_reported_with_the_way_to_keep_it(tmp_path, make_rows, caplog):
    """Once per key, with the argument that keeps it; parts of the tokens can be derived and are not reported."""
    rows = make_rows([4, 5])
    for row in rows:  # keys of no other test: each is said once in a process
        row["tokens", "response"] = row["tokens", "full"][2:]
        row["next", "lost_score"], row["lost_note"] = torch.tensor(0.5), "a note"
        row["lost_weights"] = torch.ones(len(row["tokens", "full"]))
    rb = TrajectoryReplayBuffer(storage=tmp_path / "store")
    with caplog.at_level("WARNING", "rlhf_pipeline"):
        for _ in range(2):
            rb.extend(lazy_stack(rows))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert said.count("extra={('next', 'lost_score'): 'float32'}") == 1
    assert said.count("extra={'lost_note': 'str'}") == 1
    assert said.count("extra=[Column('lost_weights', 'float32', ragged=True)]") == 1
    assert "response" not in said
    rb.storage.close()


def test_token_values_of_a_whole_buffer(make, make_rows):
    """`rb[:]` reads them when they are asked for: ragged, as a list, or padded; prompt and response apart."""
    rb = make(transform=MCAdvantage(2))
    view = rb[:]
    full = view.get(keys.TOKENS, as_list=True)
    assert [len(row) for row in full] == [4 + i % 3 for i in range(8)]
    assert [row.tolist() for row in view[keys.TOKENS].unbind()] == [row.tolist() for row in full]
    for name, part in (("prompt", slice(None, 2)), ("response", slice(2, None))):
        got = view.get(("tokens", name), as_list=True)
        assert [row.tolist() for row in got] == [row[part].tolist() for row in full]
    padded = view.get(("log_probs", "response"), as_padded_tensor=True, padding_value=5.0)
    assert padded.shape == (8, 4)
    assert padded[0, 2:].tolist() == [5.0, 5.0]
    batch = rb.read(rb.store.ids())
    for key in (keys.REWARD, keys.KL_PENALTY, keys.REF_LOG_PROBS, keys.ASSISTANT_MASK):
        want = batch.get(key) if key in batch.keys(True) else rb.read(rb.store.ids(), keys=[key])[key]
        for i, row in enumerate(view.get(key, as_list=True)):
            assert torch.equal(row, want[i, : len(row)])
    assert view["next", "policy_version"].tolist() == [3] * 8
    assert view.get("nothing", None) is None
    with pytest.raises(KeyError):
        view["nothing"]


def test_a_view_goes_through_the_write_path_unchanged(make, make_rows):
    """`rb[:]` of a buffer with KL transforms: what is stored is not scored again."""
    rb = make(rows=0, transform=Compose(MCAdvantage(2), KLRewardTransform(coef=0.1)))
    rb.extend(lazy_stack(make_rows([4, 5])))
    assert len(rb[:]) == 2
    assert rb[:]["advantage"].abs().sum() > 0


@pytest.mark.parametrize("sampler", [None, "priority"])
def test_priorities_are_a_column(make, sampler):
    """`update_priority` and `update_tensordict_priority` reach the store, whatever the sampler."""
    rb = make(sampler=sampler, batch_size=3)
    rb.update_priority(torch.tensor([0, 1]), torch.tensor([5.0, 6.0]))
    rb.update_priority([7], 9.0)
    assert rb[:]["priority"].tolist() == [5.0, 6.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]
    batch = rb.read(rb.storage.row_ids([2, 3]))
    batch["index"], batch["td_error"] = torch.tensor([2, 3]), torch.tensor([[1.0, 4.0], [3.0, 2.0]])
    rb.update_tensordict_priority(batch)
    assert TrajectoryStorage(rb.storage.store.path, mode="r")[:]["priority"].tolist()[2:4] == [4.0, 3.0]
    with pytest.raises(KeyError, match="td_error"):
        rb.update_tensordict_priority(batch.exclude("td_error"))


def test_priorities_go_to_the_trajectories_that_were_sampled(tmp_path, make_rows):
    """A ring has given their slots to others in between: those keep their own."""
    rb = TrajectoryReplayBuffer(storage=TrajectoryStorage(tmp_path / "ring", max_size=4), batch_size=4)
    rb.extend(lazy_stack(make_rows([4] * 4)))
    batch = rb.read(rb.storage.row_ids([0, 3]))
    batch["index"], batch["td_error"] = torch.tensor([0, 3]), torch.tensor([7.0, 8.0])
    rb.extend(lazy_stack(make_rows([4] * 2, first_group=9)))
    rb.update_tensordict_priority(batch)
    assert rb[:]["priority"].tolist() == [1.0, 1.0, 1.0, 8.0]
    rb.storage.close()
