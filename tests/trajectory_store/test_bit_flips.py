"""A flipped bit in any file is reported, or no reader can tell the difference.

One in every file, and 100 per medium at least; `STORE_FLIPS` says how many.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.damage import flip
from trajectory_store import TrajectoryStore

from ._folders import everything, files, in_memory, make, outcome

FLIPS = int(os.environ.get("STORE_FLIPS", "100"))


def plain_values(path):
    """Every array that plain zarr-python finds, also in archives: by place, its values or what it raises."""
    found = {}

    def walk(name, open_group):
        try:
            for key, array in open_group().members(max_depth=None):
                if isinstance(array, zarr.Array):
                    found[f"{name}/{key}"] = np.asarray(array[...])
        except Exception as error:  # noqa: BLE001 - whatever it raises is an effect
            found[name] = repr(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        walk("", lambda: zarr.open_group(path, mode="r"))
        for file in files(path):
            if file.suffix == ".zip":
                store = zarr.storage.ZipStore(file, mode="r")
                walk(str(file.relative_to(path)), lambda store=store: zarr.open_group(store, mode="r"))
                store.close()
    return found


def differs(before, after):
    """Whether a reader of plain arrays could tell; what lies behind the last value that was written is nobody's.

    All values of the stores here are other than 0, so the last that is not 0 is the last that was written.
    """
    if before.keys() != after.keys():
        return "other arrays"
    for name, old in before.items():
        new = after[name]
        if isinstance(old, str) or isinstance(new, str) or old.shape != new.shape or old.dtype != new.dtype:
            if not (isinstance(old, str) and isinstance(new, str)):
                return name
            continue
        used = np.flatnonzero(old.view(np.uint8).ravel()) if old.size else []
        end = int(used[-1]) // old.dtype.itemsize + 1 if len(used) else 0
        if old.ravel()[:end].tobytes() != new.ravel()[:end].tobytes():
            return name
    return None


@pytest.mark.crash
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_a_flipped_bit_is_reported_or_changes_nothing(backend):
    """Rows, updates, what upkeep made of them, and every file beside: our readers and plain zarr-python."""
    with tempfile.TemporaryDirectory(prefix="flips-", dir=in_memory()) as folder:
        sweep(Path(folder), backend)


def sweep(tmp_path, backend):
    """Flip bits, one at a time, each in a copy."""
    path = make(tmp_path / "s", backend, sessions=7, compact_after=4)
    with TrajectoryStore.open(path) as store:
        wanted, report = everything(store), store.verify()
        assert report.ok, str(report)
    plain = plain_values(path)
    assert sum(not isinstance(values, str) for values in plain.values()) > 10, plain
    rng = random.Random(backend)
    names = [file.relative_to(path) for file in files(path) if file.stat().st_size]
    said: Counter[str] = Counter()
    flips = max(FLIPS, len(names))
    for number in range(flips):
        file = names[number] if number < len(names) else rng.choice(names)
        data = (path / file).read_bytes()
        inked = [at for at in range(0, len(data), max(1, len(data) // 4000)) if data[at]]
        at = rng.choice(inked) if inked and rng.random() < 0.8 else rng.randrange(len(data))
        bit = rng.randrange(8)
        what = f"{file}: byte {at} of {len(data)}, bit {bit}"
        copy = shutil.copytree(path, tmp_path / "copy")
        flip(copy / file, at, bit)
        answer = outcome(copy, wanted, what)
        said[answer] += 1
        if answer == "intact":
            where = differs(plain, plain_values(copy))
            assert where is None, f"{what}: verify says all is well, and plain zarr-python reads another {where}"
        shutil.rmtree(copy)
    assert said["reported"] + said["refused"] > flips // 4, said
