"""A run in an object store, in the small: leases, lines in parts, sealed folders in pieces, claims."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlhf_pipeline.errors import DataError, LeaseLostError, RunExistsError
from rlhf_pipeline.run.address import BESIDE
from rlhf_pipeline.run.files import folder_problem, new_folder
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.processes.claims import FreeRollouts, StalenessLimit
from rlhf_pipeline.run.processes.rollouts import RolloutSet
from rlhf_pipeline.run.processes.weights import Published
from rlhf_pipeline.run.remote.bundles import BundledFolders
from rlhf_pipeline.run.remote.copies import CACHE, new_copy
from rlhf_pipeline.run.remote.leases import Leases
from rlhf_pipeline.run.remote.mirror import Mirror
from rlhf_pipeline.run.remote.outbox import Outbox
from rlhf_pipeline.run.remote.rollouts import BucketRollouts, LeasedClaims
from rlhf_pipeline.run.remote.rows import BLOCK, LineLog, SharedRows
from tests.rlhf_pipeline.small import stored_rollout
from trajectory_store import Column, Schema, StoreError, TrajectoryStore
from trajectory_store.bucket import PATIENCE

obstore = pytest.importorskip("obstore")

from trajectory_store.objects.remote import ObstoreBucket  # noqa: E402

PUBLISHED = Published(version=0, next_version=0, rollouts_done=0)
ROOMY = StalenessLimit(steps_per_rollout=1, max_staleness=9)


@pytest.fixture
def memory():
    return obstore.store.MemoryStore()


def bucket(memory) -> ObstoreBucket:
    return ObstoreBucket(memory, "memory://run")


# ------------------------------------------------------------------------------------------------ compare-and-swap


def test_of_many_that_swap_one_wins(memory):
    """Eight threads replace the same content; the tag of the winner is the one that is there."""
    first = bucket(memory).swap("claims", b"0", None)
    won: list[tuple[int, str]] = []

    def race(number: int) -> None:
        tag = bucket(memory).swap("claims", f"by {number}".encode(), first)
        if tag is not None:
            won.append((number, tag))

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((number, tag),) = won
    assert bucket(memory).tagged("claims") == (f"by {number}".encode(), tag)
    assert bucket(memory).tagged("claims", tag) is None
    assert bucket(memory).swap("claims", b"new", None) is None


def test_a_swap_whose_reply_is_lost_is_found_out(memory):
    """The object says whose it is; the same call does not take its own content for somebody else's."""
    real = bucket(memory)

    class Deaf:
        def __getattr__(self, name):
            return getattr(obstore, name)

        def put(self, *args, **kwargs):
            obstore.put(*args, **kwargs)
            raise obstore.exceptions.GenericError("the reply is lost")

    first = real.swap("pointer", b"a", None)
    real._obs = Deaf()
    second = real.swap("pointer", b"b", first)
    assert second is not None
    assert bucket(memory).tagged("pointer") == (b"b", second)


def test_a_request_is_tried_for_a_time_and_not_a_number_of_times(memory, monkeypatch):
    """What comes back within the patience is as if nothing had been; what does not is an error that names the key."""
    monkeypatch.setenv(PATIENCE, "0.5")
    real, since = bucket(memory), time.monotonic()

    class Gone:
        def __init__(self, seconds: float) -> None:
            self.until = time.monotonic() + seconds

        def __getattr__(self, name):
            if time.monotonic() < self.until:
                raise OSError("no route to host")
            return getattr(obstore, name)

    real._obs = Gone(0.3)
    assert real.put_once("part", b"a")
    assert time.monotonic() - since > 0.3
    real._obs = Gone(9)
    with pytest.raises(StoreError, match=r"part.*no route to host"):
        real.get("part")
    with pytest.raises(StoreError, match=r"part.*no route to host"):
        real.put_once("part", b"a")
    monkeypatch.setenv(PATIENCE, "long")
    with pytest.raises(StoreError, match="TRAJECTORY_STORE_PATIENCE_S is 'long'"):
        real.get("part")


def test_processes_that_begin_at_once_leave_each_other_their_folders(tmp_path, monkeypatch):
    """One that is being made is not taken for a dead process's, and one whose owner is gone is removed."""
    monkeypatch.setenv(CACHE, str(tmp_path))
    real, meanwhile = os.open, [lambda: new_copy(owners[1])]
    owners = [type("Owner", (), {})() for _ in range(3)]

    def open_late(path, *args, **kwargs):
        found = real(path, *args, **kwargs)
        if meanwhile and Path(path).name == ".in-use":
            meanwhile.pop()()  # between the file and its lock
        return found

    monkeypatch.setattr(os, "open", open_late)
    first = new_copy(owners[0])
    assert first.is_dir()
    assert len(list(tmp_path.iterdir())) == 2
    del owners[:2]
    gc.collect()
    third = new_copy(owners[0])
    assert list(tmp_path.iterdir()) == [third]


# ------------------------------------------------------------------------------------------------ lines in parts


def rows_of(memory, path: Path, writer: str) -> tuple[SharedRows, Outbox]:
    outbox = Outbox()
    return SharedRows(path / writer / "ledger.jsonl", LineLog(bucket(memory), "ledger.jsonl", writer, outbox)), outbox


def test_lines_are_followed_and_taken_back(memory, tmp_path):
    """A reader has what the writer has, also after lines were taken back, and one that begins later has it, too."""
    written, outbox = rows_of(memory, tmp_path, "writer")
    early, _ = rows_of(memory, tmp_path, "early")
    written.begin()
    for step in range(1, 6):
        written.append({"step": step, "loss": step / 4})
    written.drop_from(4)
    written.append({"step": 4, "loss": 9.0})
    outbox.flush()
    late, _ = rows_of(memory, tmp_path, "late")
    early._log._looked = -1e9
    early.refresh()
    assert [row["loss"] for row in late] == [row["loss"] for row in early] == [0.25, 0.5, 0.75, 9.0]
    assert list(written) == list(late)


def test_a_second_writer_ends_the_first(memory, tmp_path):
    """What the first one adds afterwards is refused and seen by nobody, although it held the file before."""
    first, outbox = rows_of(memory, tmp_path, "first")
    first.begin()
    first.append({"step": 1})
    outbox.flush()
    second, sent = rows_of(memory, tmp_path, "second")
    second.begin()
    first.append({"step": 2, "by": "first"})
    with pytest.raises(LeaseLostError, match="another process"):
        outbox.flush()
    second.append({"step": 2, "by": "second"})
    sent.flush()
    assert [row.get("by") for row in rows_of(memory, tmp_path, "reader")[0]] == [None, "second"]


def test_many_parts_are_read_as_blocks(memory, tmp_path):
    """A reader that begins needs a request per 256 steps, and not one per step."""
    written, outbox = rows_of(memory, tmp_path, "writer")
    written.begin()
    for step in range(1, 2 * BLOCK + 5):
        written.append({"step": step})
    outbox.flush()
    reading = bucket(memory)
    rows = SharedRows(tmp_path / "reader" / "ledger.jsonl", LineLog(reading, "ledger.jsonl", "reader", Outbox()))
    assert len(rows) == 2 * BLOCK + 4
    assert reading.traffic.requests <= 2 + 2 + 5


def test_a_changed_part_is_named(memory, tmp_path):
    """A line that fails its checksum is an error that names the file, and yields no row."""
    written, outbox = rows_of(memory, tmp_path, "writer")
    written.begin()
    written.append({"step": 1, "loss": 0.5})
    outbox.flush()
    key = bucket(memory).keys("ledger.jsonl/parts/")[-1]
    obstore.put(memory, key, bytes(obstore.get(memory, key).bytes()).replace(b"0.5", b"0.6"))
    with pytest.raises(DataError, match=r"ledger\.jsonl: a part fails its checksum"):
        rows_of(memory, tmp_path, "reader")


# ---------------------------------------------------------------------------------------------- sealed folders


def seal(root: Path, name: str, tensors: dict[str, np.ndarray]) -> None:
    with new_folder(root / name) as folder:
        save_file(tensors, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text("x" * 1000)


def test_what_has_not_changed_does_not_move(memory, tmp_path):
    """Of weights of which one tensor has changed, that tensor is sent and fetched, and little else."""
    rng = np.random.default_rng(0)
    tensors = {f"layer-{n}": rng.normal(size=(64, 256)).astype(np.float32) for n in range(8)}
    there, here = bucket(memory), bucket(memory)
    writer, reader = BundledFolders(there, tmp_path / "a"), BundledFolders(here, tmp_path / "b")
    seal(tmp_path / "a", "weights/version-00000001", tensors)
    writer.keep("weights/version-00000001")
    reader.bring("weights/version-00000001")
    whole = there.traffic.sent
    assert whole > 8 * 65_536
    tensors["layer-3"] = tensors["layer-3"] + 1
    seal(tmp_path / "a", "weights/version-00000002", tensors)
    sent, received = there.traffic.sent, here.traffic.received
    writer.keep("weights/version-00000002")
    reader.bring("weights/version-00000002")
    assert 65_536 < there.traffic.sent - sent < 65_536 + 8_192
    assert 65_536 < here.traffic.received - received < 65_536 + 8_192
    folder = tmp_path / "b" / "weights" / "version-00000002"
    assert folder_problem(folder) is None
    assert (load_file(folder / "model.safetensors")["layer-3"] == tensors["layer-3"]).all()


def test_packs_go_with_the_last_folder_that_needs_them(memory, tmp_path):
    """An old version's pack stays while a newer one has tensors in it, and is gone afterwards."""
    writer = BundledFolders(bucket(memory), tmp_path)
    tensors = {"a": np.zeros(1000, np.float32), "b": np.ones(1000, np.float32)}
    seal(tmp_path, "weights/version-00000001", tensors)
    writer.keep("weights/version-00000001")
    tensors["b"] = tensors["b"] * 2
    seal(tmp_path, "weights/version-00000002", tensors)
    writer.keep("weights/version-00000002")
    writer.drop("weights/version-00000001")
    assert len(bucket(memory).keys("packs/")) == 2
    reader = BundledFolders(bucket(memory), tmp_path / "reader")
    reader.bring("weights/version-00000002")
    assert folder_problem(tmp_path / "reader" / "weights" / "version-00000002") is None
    writer.drop("weights/version-00000002")
    assert bucket(memory).keys("packs/") == []
    BundledFolders(bucket(memory), tmp_path / "other").bring("weights/version-00000002")
    assert not (tmp_path / "other" / "weights" / "version-00000002").exists()


def test_what_one_process_fetches_does_not_change_what_another_one_writes(memory, tmp_path, monkeypatch):
    """Processes of one supervisor share a folder for heartbeats, and no copies: an old record does not come back."""
    monkeypatch.setenv(BESIDE, str(tmp_path))
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **_: memory)
    bucket(memory).put("group.json", b"old")
    first, other = RunFolder("s3://memory/run"), RunFolder("s3://memory/run")
    first.group_file.write_bytes(b"new")
    assert other.bring(other.group_file).read_bytes() == b"old"
    first.keep(first.group_file)
    first.flush()
    assert other.bring(other.group_file).read_bytes() == b"new"


# ------------------------------------------------------------------------------------------ leases and claims


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setenv("RLHF_PIPELINE_LEASE_S", "0.4")


def test_a_name_is_free_once_its_lease_is_not_renewed(memory, short):
    """One process has it; after the time of the lease without a renewal another one takes it."""
    holder, other = Leases(bucket(memory)), Leases(bucket(memory))
    with holder.hold("learner", "a", wait_s=0, report=dict):
        taken = other.hold("learner", "b", wait_s=0, report=dict)
        with pytest.raises(RunExistsError, match="already has a process learner: process"), taken:
            pass
        time.sleep(0.8)
        assert other.living() == {"learner"}
    assert bucket(memory).keys("processes/") == ["processes/learner.json"]
    bucket(memory).swap("processes/learner.lease", b'{"pid": 1, "host": "gone"}', None)  # killed: never renewed
    started = time.monotonic()
    with other.hold("learner", "b", wait_s=0.1, report=dict):
        assert time.monotonic() - started >= 0.4


def test_no_process_has_a_run_for_itself_beside_one_that_works_on_it(memory, short, monkeypatch):
    """At a URL they share no lock: what would remove or compact the run looks at the leases."""
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **_: memory)
    run, other = RunFolder("s3://memory/run"), RunFolder("s3://memory/run")
    with run.place.lease("learner"):
        alone = other.lock(advice="Wait.")
        with pytest.raises(RunExistsError, match=r"its own processes \(learner\)\. Wait\."), alone:
            pass
        assert [name for name in ("learner", "collector-0") if other.place.is_alive(name)] == ["learner"]
    assert RunFolder("s3://memory/run").in_use_since() is None
    with RunFolder("s3://memory/run").lock():
        assert RunFolder("s3://memory/run").in_use_since() is not None


def claims_of(memory, trajectories, name: str, monkeypatch) -> tuple[LeasedClaims, TrajectoryStore, Mirror]:
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **_: memory)
    mirror = Mirror("s3://memory/run")
    store = TrajectoryStore.open(trajectories, "a")
    return LeasedClaims(mirror, name, FreeRollouts(BucketRollouts(mirror.bucket), ROOMY), store), store, mirror


@pytest.fixture
def trajectories():
    made = obstore.store.MemoryStore()
    TrajectoryStore.create(made, Schema([Column("group", "int64")])).close()
    return made


def test_a_collector_that_stood_still_stores_nothing_afterwards(memory, trajectories, short, monkeypatch):
    """Another one takes its rollout over and finds what was committed; a commit after that is refused."""
    slow, its_store, mirror = claims_of(memory, trajectories, "collector-0", monkeypatch)
    with mirror.lease("collector-0"):
        assert slow.claim(PUBLISHED) == 0
        its_store.append({"group": [0]})
        BucketRollouts(bucket(memory)).add(stored_rollout(0))
        slow.release(done=True)
        assert slow.claim(PUBLISHED) == 1
    # From here on it is not heard of.
    quick, store, mirror = claims_of(memory, trajectories, "collector-1", monkeypatch)
    with mirror.lease("collector-1"):
        assert quick.claim(PUBLISHED) == 1
        with pytest.raises(LeaseLostError, match="rollout 1 was taken over"):
            its_store.append({"group": [1]})
        store.append({"group": [1]})
        store.refresh()
        assert sorted(store.read_scalars("group").tolist()) == [0, 1]
        slow.release(done=False)  # changes nothing: the claim is not its own
        assert json.loads(bucket(memory).get("claims.json") or b"")["claims"]["1"]["owner"] == "collector-1"
    store.close()
    its_store.close()


def test_live_collectors_have_different_rollouts(memory, trajectories, short, monkeypatch):
    """A rollout whose collector renews its lease is passed over; one that was given back is the next again."""
    (one, a, first), (two, b, second) = (
        claims_of(memory, trajectories, f"collector-{n}", monkeypatch) for n in range(2)
    )
    with first.lease("collector-0"), second.lease("collector-1"):
        assert (one.claim(PUBLISHED), two.claim(PUBLISHED)) == (0, 1)
        one.release(done=False)
        two.release(done=False)
        assert two.claim(PUBLISHED) == 0
    a.close()
    b.close()


def test_stored_rollouts_are_reported_once_and_in_order(memory):
    """Whatever the order in which they come; one that two have stored is one."""
    rollouts, known = BucketRollouts(bucket(memory)), RolloutSet(2)
    for number in (3, 0, 5, 2, 3):
        rollouts.add(stored_rollout(number))
    assert rollouts.new(known) == [2, 3, 5]
    assert rollouts.new(known) == []
    rollouts.add(stored_rollout(4))
    assert rollouts.new(known) == [4]
    assert rollouts.get(4) == stored_rollout(4)
    assert rollouts.get(9) is None
    with pytest.raises(DataError, match="rollout 9"):
        rollouts.required(9)


def test_what_is_wanted_later_is_read_beside_the_work(memory, monkeypatch):
    """At a URL it is there when the work is done, and what went wrong is told to who asks."""
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **_: memory)
    mirror, begun, worked = Mirror("s3://memory/run"), threading.Event(), threading.Event()

    def read() -> str:
        begun.set()
        assert worked.wait(10)
        return "news"

    found = mirror.ahead(read)
    assert begun.wait(10)
    worked.set()
    mirror.flush()
    assert found() == "news"
    failed = mirror.ahead(lambda: mirror.bucket.get("claims.json") or json.loads("?"))
    mirror.flush()
    with pytest.raises(json.JSONDecodeError):
        failed()
    looks: list[float] = []

    def at_the_third_look() -> list[float]:
        looks.append(time.monotonic())
        begun.set() if len(looks) == 3 else begun.clear()
        return looks if len(looks) == 3 else []

    begun.clear()
    found = mirror.ahead(at_the_third_look)
    assert begun.wait(10)
    assert len(found()) == 3
    mirror.ahead(list)
    mirror.flush()  # what is not there when the process leaves is not waited for


def test_requests_are_counted_once(memory, trajectories, monkeypatch):
    """Those to the run and to the store of trajectories, each in the line of metrics that is written next."""
    monkeypatch.setattr(obstore.store, "from_url", lambda url, **_: memory)
    mirror = Mirror("s3://memory/run")
    with TrajectoryStore.open(trajectories, "a") as store:
        mirror.bucket.put("group.json", b"four")
        opened = store.traffic
        assert mirror.traffic(store) == {
            "requests": opened.requests + 1,
            "bytes_sent": opened.sent + 4,
            "bytes_received": opened.received,
        }
        assert set(mirror.traffic(store).values()) == {0}
        store.append({"group": [0]})
        assert mirror.traffic(store)["requests"] > 0
