"""Files deleted, swapped, cut, linked or forged: damage is named, costs what it touches, and goes no further.

Each test damages a store in some 24 places, drawn at random; `STORE_DAMAGES=1000` means every place,
`STORE_SEED` draws others.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import struct
import tempfile
import threading
import warnings
import zipfile
from contextlib import contextmanager
from pathlib import Path

import google_crc32c
import pytest

from trajectory_store import CorruptionError, StoreError, TrajectoryStore, format
from trajectory_store.objects.archive import pack

from ._folders import SCHEMA, everything, files, folders, in_memory, make, outcome, rows

BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])


DAMAGES = int(os.environ.get("STORE_DAMAGES", "24"))
SEED = int(os.environ.get("STORE_SEED", "1"))


def exhaustive(test):
    """Each of these damages a store in many places."""
    return pytest.mark.slow(pytest.mark.timeout(300)(test))


def some(places, most=DAMAGES):
    """So many of them at most, the same ones every time; the first and the last are among them."""
    places = list(places)
    inner = places[1:-1]
    return [*places[:1], *random.Random(most).sample(inner, min(len(inner), max(0, most - 2))), *places[1:][-1:]]


@pytest.fixture
def tmp_path():
    """A folder in memory, where there is one."""
    with tempfile.TemporaryDirectory(prefix="damage-", dir=in_memory()) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def stores():
    """Closed stores to copy, by medium and kind, each with what a reader sees."""
    made = {}
    room = tempfile.TemporaryDirectory(prefix="stores-", dir=in_memory())

    def get(backend, kind):
        if (backend, kind) not in made:
            path = Path(room.name, backend, kind)
            path.parent.mkdir(exist_ok=True)
            if kind == "plain":
                make(path, backend)
            elif kind == "compacted":
                make(path, backend, compact_after=2)
            else:
                make(path, backend, sessions=8, count=40, segment_rows=40)
            with TrajectoryStore.open(path) as store:
                assert store.verify().ok
                made[backend, kind] = path, everything(store)
        return made[backend, kind]

    yield get
    room.cleanup()


@pytest.fixture
def copies(stores, tmp_path):
    """Gives copies of a store, and what an undamaged one says."""

    def get(backend, kind):
        path, wanted = stores(backend, kind)

        def copy():
            shutil.rmtree(tmp_path / "s", ignore_errors=True)
            return shutil.copytree(path, tmp_path / "s")

        return copy, wanted

    return get


def _overwrite(file, change):
    data = file.read_bytes()
    file.write_bytes(change(data))


MUTILATIONS = {
    "deleted": lambda file: file.unlink(),
    "emptied": lambda file: os.truncate(file, 0),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "zeroed": lambda file: _overwrite(file, lambda data: bytes(len(data))),
    "scrambled": lambda file: _overwrite(file, lambda data: bytes(byte ^ 0x5A for byte in data)),
}


@exhaustive
@BACKENDS
@pytest.mark.parametrize("kind", ["plain", "compacted"])
@pytest.mark.parametrize("mutilation", list(MUTILATIONS))
def test_no_file_is_lost_in_silence(copies, backend, kind, mutilation):
    """Whatever happens to one file: `verify` or the opening says so, or every answer is as before."""
    copy, wanted = copies(backend, kind)
    for number in some(range(len(files(copy())))):
        path = copy()
        file = files(path)[number]
        MUTILATIONS[mutilation](file)
        outcome(path, wanted, f"{file.relative_to(path)} {mutilation}")


@exhaustive
@BACKENDS
@pytest.mark.parametrize("kind", ["plain", "compacted"])
def test_no_folder_is_lost_in_silence(copies, backend, kind):
    """A whole folder deleted, at any depth, the newest one too."""
    copy, wanted = copies(backend, kind)
    for number in some(range(len(folders(copy())))):
        path = copy()
        folder = folders(path)[number]
        shutil.rmtree(folder)
        outcome(path, wanted, f"{folder.relative_to(path)} deleted")


@exhaustive
@BACKENDS
@pytest.mark.parametrize("kind", ["plain", "compacted"])
def test_swapped_files_and_folders_are_named(copies, backend, kind):
    """Two of the same name's pattern or the same size have changed places."""
    copy, wanted = copies(backend, kind)

    def pattern(path):
        return re.sub("[0-9]+", "0", str(path))

    names = [p.relative_to(path) for path in [copy()] for p in [*files(path), *folders(path)]]
    pairs = [(a, b) for a in names for b in names if a < b and a.parent == b.parent and pattern(a) == pattern(b)]
    pairs += [
        (a, b)
        for a in names
        for b in names
        if a < b and a.parent != b.parent and pattern(a) == pattern(b) and len(a.parts) == len(b.parts) <= 3
    ]
    assert pairs
    for a, b in some(pairs):
        path = copy()
        os.rename(path / a, path / "between")
        os.rename(path / b, path / a)
        os.rename(path / "between", path / b)
        outcome(path, wanted, f"{a} and {b} swapped")


@BACKENDS
def test_files_that_come_back_double_nothing(stores, tmp_path, backend):
    """A backup laid over a store that was compacted since brings old files back: every row is still there once."""
    path = shutil.copytree(stores(backend, "plain")[0], tmp_path / "s")
    backup = shutil.copytree(path, tmp_path / "backup")
    with TrajectoryStore.open(path, "a") as store:
        store.compact()
    with TrajectoryStore.open(path) as store:
        wanted = everything(store)
    for file in files(backup):
        there = path / file.relative_to(backup)
        if not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, there)
    outcome(path, wanted, "old files laid over")


@BACKENDS
@pytest.mark.parametrize("kind", ["plain", "compacted"])
@pytest.mark.parametrize("mutilation", ["deleted", "zeroed"])
def test_one_bad_object_of_the_catalog_costs_nothing(copies, backend, kind, mutilation):
    """Every record is there twice: readers see all, writers go on and remove nothing, verify names the object."""
    copy, wanted = copies(backend, kind)
    for name in [file.name for file in sorted((copy() / "catalog").iterdir())[-4:] if file.name != "zarr.json"]:
        path = copy()
        MUTILATIONS[mutilation](path / "catalog" / name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with TrajectoryStore.open(path) as store:
                assert everything(store) == wanted
                assert (mutilation, name[-4:]) == ("deleted", "copy") or name in str(store.verify())
            with TrajectoryStore.open(path, "a") as store:
                store.compact()
            with TrajectoryStore.open(path) as store:
                assert everything(store) == wanted


@exhaustive
@BACKENDS
def test_one_bad_file_costs_what_it_holds(copies, backend):
    """Whichever file of a folder is garbage, the store opens, and most rows are there as they were."""
    copy, wanted = copies(backend, "wide")
    known = dict(zip(wanted["ids"], zip(wanted["tag"], wanted["x"], wanted["mask"], strict=True), strict=True))
    root = copy()
    inner = [number for number, file in enumerate(files(root)) if file.parent != root]
    for number in some(inner, DAMAGES // 2):
        path = copy()
        file = files(path)[number]
        file.write_bytes(b"\xff{garbage")
        what = f"{file.relative_to(path)} is garbage"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                with TrajectoryStore.open(path) as store:
                    good = 0
                    for row in store.ids().tolist():
                        try:
                            found = store.read([row], ["tag", "x", "mask"])
                        except StoreError:
                            continue
                        values = (int(found["tag"][0]), found["x"][0].tolist(), found["mask"][0].tolist())
                        good += values == known[row]
                    assert good >= len(known) // 2, f"{what}: {good} of {len(known)} rows are right"
                    assert not store.verify().ok or good == len(known), what
            except Exception as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


BAD_VALUES = ["x", -1, 0, 10**12, 2**63, 1.5, None, [], {}, [[[[]]]], True, "../../victim"]
BAD_DOCUMENTS = [b"", b"{", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000]


def _leaves(value, way=()):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*way, name)
            yield from _leaves(inner, (*way, name))
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield (*way, at)
            yield from _leaves(inner, (*way, at))


def _documents(path):
    """Every JSON document: the file, and the name inside it where it is an archive."""
    for file in files(path):
        if zipfile.is_zipfile(file):
            yield from ((file, name) for name in zipfile.ZipFile(file).namelist() if name.endswith("json"))
        elif file.name.endswith("json"):
            yield file, None


def _document(file, name):
    return file.read_bytes() if name is None else zipfile.ZipFile(file).read(name)


def _replace(file, name, document):
    if name is None:
        file.write_bytes(document)
        return
    old = zipfile.ZipFile(file)
    file.write_bytes(pack([(n, document if n == name else old.read(n)) for n in old.namelist()]))


@contextmanager
def little_memory(more=2 << 30):
    """So many bytes of address space on top of what the process has: who asks for more gets a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@exhaustive
@BACKENDS
@pytest.mark.parametrize("kind", ["plain", "compacted"])
def test_forged_metadata_is_an_error_of_the_store(copies, backend, kind):
    """Wrong types, huge numbers, odd names and deep nesting anywhere: a StoreError or a report, in little memory."""
    copy, wanted = copies(backend, kind)
    rng = random.Random(SEED)
    documents = [(file.relative_to(path), name) for path in [copy()] for file, name in _documents(path)]
    with little_memory():
        for _ in range(2 * DAMAGES):
            path = copy()
            file, name = rng.choice(documents)
            if rng.random() < 0.2:
                forged, what = rng.choice(BAD_DOCUMENTS), "a bad document"
            else:
                raw = _document(path / file, name)
                document = json.loads(raw)
                way = rng.choice(list(_leaves(document)))
                place = document
                for step in way[:-1]:
                    place = place[step]
                place[way[-1]] = value = rng.choice(BAD_VALUES)
                form = {"indent": 1} if b"\n" in raw else {"separators": (",", ":")}
                forged, what = json.dumps(document, **form).encode(), f"{way} = {value!r}"
            _replace(path / file, name, forged)
            outcome(path, wanted, f"{file} {name or ''}: {what}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                try:
                    with TrajectoryStore.open(path, "a") as store:
                        store.append(rows([77]))
                        store.compact()
                except StoreError:
                    pass
                except Exception as error:
                    raise AssertionError(f"{file}: {what}: appending: {type(error).__name__}: {error}") from error


@exhaustive
@BACKENDS
@pytest.mark.parametrize("kind", ["plain", "compacted"])
def test_names_with_huge_numbers_cost_nothing(copies, backend, kind):
    """A copy of anything that carries a number, under a far larger one: appends go on, in little memory."""
    copy, wanted = copies(backend, kind)
    names = [p.relative_to(path) for path in [copy()] for p in [*files(path), *folders(path)]]
    numbered = [name for name in names if re.search("[0-9]{4,}", name.name) and len(name.parts) <= 2]
    assert numbered
    for name in some(numbered, DAMAGES // 3):
        for number in ("99999999", "9999999999", "99999999999999999999"):
            path = copy()
            forged = path / name.parent / re.sub("[0-9]{4,}", number, name.name, count=1)
            if (path / name).is_dir():
                shutil.copytree(path / name, forged)
            else:
                shutil.copy(path / name, forged)
            with little_memory():
                outcome(path, wanted, f"{name} copied to {forged.name}")
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", RuntimeWarning)
                    try:
                        with TrajectoryStore.open(path, "a") as store:
                            ids = store.append(rows([77]))
                            assert store.read(ids)["tag"].tolist() == [78]
                    except StoreError:
                        pass


@exhaustive
@BACKENDS
def test_nothing_outside_is_read_or_changed_through_links(copies, tmp_path, backend):
    """A file replaced by a link to one outside is damage; a folder so replaced is not written, emptied or removed."""
    copy, wanted = copies(backend, "compacted")
    names = [p.relative_to(path) for path in [copy()] for p in [*files(path), *folders(path)]]
    for name in some(names):
        path, outside = copy(), tmp_path / "outside"
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        os.rename(path / name, outside / "victim")
        (path / name).symlink_to(outside / "victim")
        is_file = (outside / "victim").is_file()
        before = {file: file.read_bytes() for file in ([outside / "victim"] if is_file else files(outside))}
        said = outcome(path, wanted, f"{name} is a link")
        assert said != "intact" or not is_file or not before[outside / "victim"], (
            f"{name} is a link, and nobody says so"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                with TrajectoryStore.open(path, "a") as store:
                    ids = store.ids()
                    store.append(rows([77]))
                    store.update(ids[:4], priority=99.5)
                    store.compact()
            except StoreError:
                pass
            except Exception as error:
                raise AssertionError(f"{name} is a link: {type(error).__name__}: {error}") from error
        after = {file: file.read_bytes() for file in before if file.exists()}
        assert after == before, f"{name} is a link, and files outside have changed"


@BACKENDS
@pytest.mark.timeout(60)
def test_a_catalog_behind_a_link_is_an_error(copies, tmp_path, backend):
    """A writer waits for no record that a listing does not show, and puts no file through the link."""
    path, outside = copies(backend, "compacted")[0](), tmp_path / "outside"
    os.rename(path / "catalog", outside)
    (path / "catalog").symlink_to(outside)
    names = sorted(os.listdir(outside))
    with (
        pytest.raises(CorruptionError, match="catalog is a link, not a folder"),
        pytest.warns(RuntimeWarning),
        TrajectoryStore.open(path, "a") as store,
    ):
        store.append(rows([77]))
    assert sorted(os.listdir(outside)) == names


@exhaustive
@BACKENDS
def test_a_pipe_in_place_of_a_file_holds_nobody_up(copies, backend):
    """A FIFO is not a file of a store: opening, reading and verifying end at once."""
    copy, wanted = copies(backend, "compacted")
    for number in some(range(len(files(copy())))):
        path = copy()
        file = files(path)[number]
        file.unlink()
        os.mkfifo(file)
        said = []
        thread = threading.Thread(
            target=lambda path=path, file=file, said=said: said.append(outcome(path, wanted, f"{file.name} is a FIFO"))
        )
        thread.start()
        thread.join(10)
        if thread.is_alive():
            unblock = os.open(file, os.O_RDWR | os.O_NONBLOCK)
            os.write(unblock, b"x")
            thread.join(10)
            os.close(unblock)
            pytest.fail(f"{file.relative_to(path)} is a FIFO, and the store waits for it")
        assert said, f"{file.relative_to(path)} is a FIFO"


@BACKENDS
@pytest.mark.parametrize("kind", ["plain", "compacted"])
def test_a_flipped_bit_in_an_updated_value_is_named(copies, backend, kind):
    """Later values lie under a checksum as rows do, wherever an upkeep put them."""
    copy, wanted = copies(backend, kind)
    values = sorted({value for value in wanted["priority"] if value != 1.0})
    assert len(values) > 2
    places = [
        (file.relative_to(path), match.start())
        for path in [copy()]
        for file in files(path)
        for value in values
        for match in re.finditer(re.escape(struct.pack("<d", value)), file.read_bytes())
    ]
    for file, at in places:
        path = copy()
        with open(path / file, "r+b") as data:
            data.seek(at + 6)
            data.write(bytes([struct.pack("<d", 1234.5)[6] ^ 1]))
        assert outcome(path, wanted, f"{file}: bit of byte {at + 6}") != "intact" or kind == "compacted"


def test_a_damaged_record_before_a_torn_commit_costs_itself(tmp_path):
    """An acknowledged record is damaged, and the commit after it was never acknowledged and is torn."""
    with TrajectoryStore.create(tmp_path / "writer", SCHEMA, durability="power") as store:
        for tag in range(3):
            store.append(rows([tag]))
        shutil.copytree(tmp_path / "writer", tmp_path / "s")  # as if its writer had been killed
    commits = tmp_path / "s/seg-00000000/commits"
    (commits / "acknowledged").write_bytes(format.pack_mark(2))
    for file, at in ((commits / "c/0/0", format.RECORD_SIZE + 24), (commits.parent / "tag/c/0", 16)):
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
    with TrajectoryStore.open(tmp_path / "s") as store:
        with pytest.warns(RuntimeWarning, match="1 row is not returned"):
            assert store.read_scalars("tag").tolist() == [1]
        assert "commit record 1 is damaged" in str(store.verify())


def test_bytes_that_are_no_record_of_the_segment():
    """Cut short, of another format, salt or place, or with a byte changed: none of them is taken for a commit."""
    record = format.Record(3, 8, 9, 20, 5, 40, format.KIND_ROWS, 1, 2, 4, 6)
    raw, parse = format.pack(record, 77), format.parse
    assert parse(raw, 77, 3) == record
    assert parse(raw, 78, 3) is None
    assert parse(raw, 77, 4) is None
    assert all(parse(raw[:size], 77, 3) is None for size in range(64))
    assert all(parse(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :], 77, 3) is None for at in range(64))
    body = b"TRJ1" + raw[4:60]
    assert parse(body + struct.pack("<I", google_crc32c.value(body)), 77, 3) is None
