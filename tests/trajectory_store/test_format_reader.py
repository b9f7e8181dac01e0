"""What FORMAT.md says is what the store writes: a reader made from the page alone finds the same as the store."""

from __future__ import annotations

import struct
from zipfile import BadZipFile

import numpy as np
import pytest

from trajectory_store import Column, Schema, TrajectoryStore

from .format_reader import read_store

SCHEMA = Schema(
    [
        Column("tag", "int64"),
        Column("right", "bool"),
        Column("x", "int32", ragged=True, mutable=True),
        Column("experts", "uint16", ragged=True, shape=(2,), mutable=True),
        Column("ref", "float32", ragged=True, mutable=True, fill=float("nan")),
        Column("frames", "float64", ragged=True, axis="frames", shape=(2, 3), mutable=True),
        Column("solo", "float16", ragged=True, axis="solo", mutable=True, fill=1.5),
        Column("prompt", "str", mutable=True),
        Column("image", "bytes", mutable=True),
        Column("note", "str", mutable=True, fill="\u00e9\u2013"),
        Column("trace", "bytes", mutable=True, fill=""),
        Column("advantage", "float32", mutable=True, fill=float("-inf")),
        Column("uses", "int32", mutable=True),
        Column("weight", "float64", ragged=True, mutable=True),
    ]
)
LATER = [
    Column("late", "int8", ragged=True, mutable=True, fill=9),
    Column("flag", "bool", mutable=True, fill=True),
    Column("remark", "str", mutable=True, fill="none"),
]
NEEDED = ["tag", "right", "x", "experts", "frames", "prompt", "image"]
BACKENDS = pytest.mark.parametrize("backend", ["memmap", "zarr"])


def values(names, tags, lengths):
    """Values that follow from the tags; `lengths` are those of the axis `tokens`."""
    made = {
        "tag": tags,
        "right": [tag % 2 == 0 for tag in tags],
        "x": [np.arange(n) + tag for tag, n in zip(tags, lengths, strict=True)],
        "experts": [np.arange(2 * n).reshape(n, 2) + tag for tag, n in zip(tags, lengths, strict=True)],
        "ref": [np.full(n, tag / 4) for tag, n in zip(tags, lengths, strict=True)],
        "frames": [np.full((tag % 3, 2, 3), tag / 8) for tag in tags],
        "solo": [np.full(tag % 4, tag / 2) for tag in tags],
        "prompt": [f"row {tag} \u00fc" * (tag % 3) for tag in tags],
        "image": [bytes([tag % 256, 0]) * (tag % 40) for tag in tags],
        "note": [f"note {tag}" for tag in tags],
        "trace": [b"\xff" * (tag % 5) for tag in tags],
        "advantage": [tag + 0.5 for tag in tags],
        "uses": [tag + 1 for tag in tags],
        "weight": [np.full(n, -tag / 2) for tag, n in zip(tags, lengths, strict=True)],
        "late": [np.full(n, tag % 100) for tag, n in zip(tags, lengths, strict=True)],
        "flag": [False for _ in tags],
        "remark": [f"remark {tag}" for tag in tags],
    }
    return {name: made[name] for name in names}


def append(store, first, count, *optional):
    """Rows with all that they need and these optional columns."""
    tags = list(range(first, first + count))
    return store.append(values([*NEEDED, *optional], tags, [tag % 6 for tag in tags]))


def update(store, ids, tag, *names):
    """Later values of these columns."""
    store.refresh()
    lengths = store.lengths("x", ids).tolist()
    store.update(ids, **values(names, [tag + i for i in range(len(ids))], lengths))


def agrees(path):
    """The independent reader finds what the store does: ids, order, values with their dtypes, presence, watermark."""
    found = read_store(path)
    with TrajectoryStore.open(path) as store:
        ids = store.ids()
        assert found["ids"] == ids.tolist()
        assert (found["watermark"], len(found["ids"])) == (store.watermark, len(store))
        assert list(found["values"]) == list(store.schema.names)
        assert store.verify().ok
        for name, wanted in store.read(ids).items():
            assert found["present"][name] == store.present(name, ids).tolist(), name
            for row_id, one, other in zip(ids, found["values"][name], wanted, strict=True):
                if not isinstance(other, (str, bytes)):
                    assert (one.dtype, one.shape) == (other.dtype, other.shape), f"{name} of {row_id}"
                    one, other = one.tobytes(), other.tobytes()  # NaN equals itself
                assert one == other, f"{name} of {row_id}"
    return found


@BACKENDS
@pytest.mark.slow
def test_the_page_says_all_that_a_reader_needs(tmp_path, backend):
    """Two writers in turns, columns left out, given, updated and added later, merged twice, with the writers open."""
    path = tmp_path / "s"
    one = TrajectoryStore.create(path, SCHEMA, backend=backend, segment_rows=16, segment_elements=400)
    assert agrees(path)["ids"] == []
    two = TrajectoryStore.open(path, "a", durability="power")
    ids = np.concatenate([append(one, 0, 5), append(two, 5, 7, "ref", "note"), append(one, 12, 4, "solo", "uses")])
    agrees(path)
    update(two, ids[3:9], 100, "uses", "advantage")
    update(one, ids[5:12], 200, "uses")
    update(two, ids[:4], 300, "prompt", "image", "frames")
    update(one, ids[2:6], 400, "ref", "weight", "experts", "x")
    update(two, ids[[1, 1, 3]], 500, "note", "solo", "trace")
    agrees(path)
    two.close()
    one.compact()
    agrees(path)
    update(one, ids[4:7], 600, "prompt", "uses", "ref")
    ids = np.concatenate([ids, append(one, 16, 20, "advantage", "weight", "trace")])
    one.close()
    with TrajectoryStore.open(path, "a", add_columns=LATER) as store:
        agrees(path)
        ids = np.concatenate([ids, append(store, 36, 3, "late", "flag"), append(store, 39, 3)])
        update(store, ids[::5], 700, "late", "remark", "flag")
        update(store, ids[::7], 800, "late", "remark", "flag")
        update(store, ids[::9], 900, "uses")
        agrees(path)
        store.compact()
        found = agrees(path)
    assert found["values"]["tag"] == list(range(42))
    assert found["values"]["remark"][35] == "remark 805"
    assert found["values"]["uses"][27] == 904


@BACKENDS
def test_the_rows_of_a_ring(tmp_path, backend):
    """Only the newest rows, while segments leave with their updates, and the watermark counts all."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, backend=backend, max_trajectories=20, segment_rows=8) as store:
        for first in range(0, 70, 5):
            append(store, first, 5)
            update(store, store.ids()[::3], first, "uses", "note")
            if first % 30 == 25:
                agrees(path)
                store.compact()
        found = agrees(path)
        assert [int(tag) for tag in found["values"]["tag"]] == list(range(50, 70))
        assert found["watermark"] == 70
    agrees(path)


@pytest.mark.parametrize("durability", ["process", "group", "power"])
def test_what_a_power_loss_left(tmp_path, durability):
    """Each commit counts on its own; one that was promised is damage until the owner has accepted its loss."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, durability=durability, segment_rows=32) as store:
        for first in (0, 4, 8):
            append(store, first, 4)
    segment = path / "seg-00000000"
    with open(segment / "commits/c/0/0", "r+b") as log:  # as if its writer had been killed
        log.seek(3 * 64)
        log.write(bytes(64))
    assert len(read_store(path)["ids"]) == 12
    tags = bytearray((segment / "tag/c/0").read_bytes())
    tags[5 * 8] ^= 1
    (segment / "tag/c/0").write_bytes(tags)
    with pytest.raises(AssertionError, match="data of record 1"):
        read_store(path)
    if durability == "process":
        with pytest.warns(RuntimeWarning, match="4 rows are not returned"):
            store = TrajectoryStore.open(path, "a")
        assert store.accept_losses() == 1
        store.close()
    else:
        with TrajectoryStore.open(path) as store:
            assert len(store) == 12
            assert not store.verify().ok
        (segment / "commits/acknowledged").write_bytes(struct.pack("<QQ", 1, (1 << 64) - 2))
    assert agrees(path)["values"]["tag"] == [0, 1, 2, 3, 8, 9, 10, 11]


@BACKENDS
def test_damage_is_noticed(tmp_path, backend):
    """A flipped byte in a value, a commit or the root is found by its checksum; one line of the catalog may be bad."""
    path = tmp_path / "s"
    with TrajectoryStore.create(path, SCHEMA, backend=backend, segment_rows=8) as store:
        ids = append(store, 3, 6)
        update(store, ids[:3], 9, "note")
        store.compact()
        append(store, 11, 2)
        update(store, ids[3:], 7, "prompt")
    agrees(path)
    flips = [(file, 64) for file in path.glob("seg-*/*.zip")]
    for name in ("tag/c/0", "target/c/0", "commits/c/0/0"):
        flips += [(file, 4) for file in path.glob(f"seg-*/{name}")]
    flips += [(path / "zarr.json", (path / "zarr.json").read_bytes().find(b"uuid") + 10)]
    assert len(flips) > 4
    for file, at in flips:
        good = file.read_bytes()
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises((AssertionError, ValueError, RuntimeError, BadZipFile)):
            read_store(path)
        file.write_bytes(good)
    wanted, record = read_store(path)["ids"], max((path / "catalog").glob("*.rec"))
    good = record.read_bytes()
    record.write_bytes(bytes([good[0] ^ 1]) + good[1:])  # its copy is enough
    assert read_store(path)["ids"] == wanted
