"""A reader of the store's format, written from storage/FORMAT.md alone; damage of any kind raises an error."""

import json
import math
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from google_crc32c import value as crc
from numcodecs import zstd


def optional(columns: list[dict[str, Any]]) -> list[str]:
    return [column["name"] for column in columns if "fill" in column or column.get("mutable")]


def layout(meta: dict[str, Any]) -> dict[str, tuple[np.dtype, tuple[int, ...], str]]:
    """The arrays of a segment in their order: dtype, shape of an element, and the axis it is along."""
    columns = meta["schema"]["columns"]
    kinds = [(c["name"], c["dtype"], tuple(c.get("shape", ())), c.get("axis", ".rows")) for c in columns]
    kinds += [(f"{axis}.offsets", "i8", (), ".edges") for axis in {c["axis"]: 0 for c in columns if "axis" in c}]
    kinds += [("present", "u8", (), ".rows")] * (meta["kind"] == "rows" and bool(optional(columns)))
    extra = ["target"] * (meta["kind"] == "update") + ["row_id", "row_time"] * meta["merged"]
    kinds += [(name, "i8", (), ".rows") for name in extra]
    return {k[0]: (np.dtype({"str": "u1", "bytes": "u1"}.get(k[1], k[1])).newbyteorder("<"), *k[2:]) for k in kinds}


def blocks(raw: bytes, size: int, first: int, merged: bool) -> Iterator[bytes]:
    """The parts of the blocks of an array that a commit wrote, whose elements have so many bytes, from `first` on."""
    block = max(1, 4096 // size) * (1 if merged or len(raw) > 524_288 else 4)
    ends = [*range((block - first % block) * size, len(raw), block * size), len(raw)] if raw else []
    return (raw[begin:end] for begin, end in zip([0, *ends], ends, strict=False))


def read_files(folder: Path, meta: dict[str, Any], accepted: Any) -> tuple[dict[str, np.ndarray], list[int]]:
    """The arrays of a segment on a local disk, and the commit time of each row; -1 for rows that do not count."""
    kinds, arrays, ends = layout(meta), {}, {".rows": 0, ".edges": 1, **dict.fromkeys(meta["elems_cap"], 0)}
    for name, (dtype, shape, _) in kinds.items():
        path = folder.joinpath(name, "c", "0", *"0" * len(shape))
        arrays[name] = (np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)).reshape(-1, *shape)
    marks = struct.unpack("<5Q", (folder / "commits/acknowledged").read_bytes().ljust(40, b"\0"))
    times, safe = [], marks[0]
    assert safe ^ marks[1] == (1 << 64) - 1, folder
    records = list(map(bytes, np.memmap(folder / "commits/c/0/0", "V64", "r")))
    written = max((i + 1 for i, record in enumerate(records) if any(record)), default=0)
    written = min(written, marks[2]) if marks[2] ^ marks[3] == (1 << 64) - 1 else written
    for i, record in enumerate(records[:written]):
        magic, salt, seq, sums_end, time, rows, new, _, kind, *_, data_sum, own_sum = struct.unpack(
            "<4sIIIQIIQIIIIII", record
        )
        good = (magic, salt, seq, own_sum) == (b"TRJ5", meta["salt"], i, crc(record[:60]))
        if good and kind == 1:
            times += [-1] * (rows - new - len(times))  # rows of a commit before it that is lost
            before = {a: int(arrays[f"{a}.offsets"][rows - new]) for a in meta["elems_cap"]}
            before |= {".rows": rows - new, ".edges": rows - new + 1}
            after = {a: int(arrays[f"{a}.offsets"][rows]) for a in meta["elems_cap"]}
            after |= {".rows": rows, ".edges": rows + 1}
            sums = b""
            for name, (dtype, shape, axis) in kinds.items():
                part, item = arrays[name][before[axis] : after[axis]].tobytes(), dtype.itemsize * math.prod(shape)
                sums += b"".join(
                    struct.pack("<I", crc(block)) for block in blocks(part, item, before[axis], meta["merged"])
                )
            good, ends = crc(sums) == data_sum, after
            stored = (folder / "commits/checks").read_bytes()[4 * sums_end - len(sums) : 4 * sums_end]
            assert not good or stored == sums, f"checksums of blocks of record {i} of {folder}"
            times += [time if good else -1] * new
        if not good:
            is_accepted = any(first <= rows - new and rows <= last + 1 for first, last in accepted)
            assert is_accepted or (i >= safe and meta["durability"] != "process"), f"data of record {i} of {folder}"
    return {name: arrays[name][: ends[axis]] for name, (_, _, axis) in kinds.items()}, times


def stored_chunks(folder: Path, array: np.ndarray) -> Iterator[bytes]:
    """The inner chunks of a sharded array as they are stored."""
    if not len(array):
        return
    size = max(1, (8192 if array.dtype.kind == "f" else 16384) // array[:1].nbytes)
    count = -(-len(array) // size)
    for number in range(-(-count // 1024)):
        raw = folder.joinpath("c", str(number), *"0" * (array.ndim - 1)).read_bytes()
        index = 16 * min(1024, count)
        assert crc(raw[-index - 4 : -4]) == int.from_bytes(raw[-4:], "little"), folder
        for begin, length in struct.iter_unpack("<QQ", raw[-index - 4 : -4]):
            if begin + 1 < 1 << 64:
                yield raw[begin : begin + length]


def read_objects(folder: Path, meta: dict[str, Any], _: Any) -> tuple[dict[str, np.ndarray], list[int]]:
    """The same of a segment of one object per commit, or of a merged one of sharded arrays."""
    times, ends, kinds = [], {}, layout(meta)
    if meta["merged"]:
        arrays = {name: zarr.open_array(folder / name, mode="r")[...] for name in kinds}
        checks, at = (folder / "checks").read_bytes(), 0
        for n, a in arrays.items():
            sums = b"".join(struct.pack("<I", crc(chunk)) for chunk in stored_chunks(folder / n, a))
            assert checks[at : at + len(sums)] == sums, f"checksums of chunks of {n} of {folder}"
            pages = (f"{crc(sums[i : i + 1024]):08x}" for i in range(0, len(sums), 1024))
            assert "".join(pages) == meta["sealed"]["checks"][n], folder
            at += len(sums)
        return arrays, arrays["row_time"].tolist()
    pieces = {name: [np.zeros((int(axis == ".edges"), *shape), dtype)] for name, (dtype, shape, axis) in kinds.items()}
    for seq, path in enumerate(sorted(folder.glob("[0-9]*.zip"))):
        with zipfile.ZipFile(path) as file:
            entries = {info.filename: file.read(info) for info in file.infolist()}
        commit = json.loads(entries["zarr.json"])["attributes"]
        assert (commit["salt"], commit["seq"], path.name) == (meta["salt"], seq, f"{seq:08d}.zip"), path
        sizes = {axis: end - commit["starts"][axis] for axis, end in commit["ends"].items()}
        sizes |= {".rows": commit["n_rows"], ".edges": commit["n_rows"] + 1}
        for name, (dtype, shape, axis) in kinds.items() if commit["n_rows"] else ():
            raw = entries.get("/".join([name, "c", "0", *"0" * len(shape)]), b"")
            raw = raw if len(raw) == np.empty((sizes[axis], *shape), dtype).nbytes else zstd.decompress(raw)
            values = np.frombuffer(raw, dtype).reshape(-1, *shape)
            size, raw = dtype.itemsize * math.prod(shape), raw[8:] if axis == ".edges" else raw
            first_row = commit["rows_end"] - commit["n_rows"]
            first = {".rows": first_row, ".edges": first_row + 1, **commit["starts"]}[axis]
            sums = (f"{crc(block):08x}" for block in blocks(raw, size, first, False))
            assert "".join(sums) == commit["crc"][name], f"{name} in {path}"
            pieces[name].append(values[1:] + ends.get(name[:-8], 0) if axis == ".edges" else values)
        times, ends = times + [commit["time_ns"]] * commit["n_rows"], commit["ends"]
    return {name: np.concatenate(piece) for name, piece in pieces.items()}, times


def cell(column: dict[str, Any], arrays: dict[str, np.ndarray], row: int) -> Any:
    """The value that a segment holds, or the fill where it lacks the column."""
    name, dtype, axis, fill = column["name"], column["dtype"], column.get("axis"), column.get("fill")
    if name in arrays:
        value = arrays[name][slice(*arrays[f"{axis}.offsets"][row : row + 2]) if axis else row]
        return bytes(value).decode() if dtype == "str" else bytes(value) if dtype == "bytes" else value
    if dtype in ("str", "bytes"):
        return fill or "" if dtype == "str" else b""
    count = int(np.diff(arrays[f"{axis}.offsets"][row : row + 2])[0]) if f"{axis}.offsets" in arrays else 0
    fill = float(fill["float"]) if isinstance(fill, dict) else fill or 0
    return np.full((count, *column.get("shape", ())) if axis else (), fill, dtype)


def read_store(path: Path) -> dict[str, Any]:
    """`ids` in the order of arrival, `watermark`, and by column `values` and `present` in that order."""
    root = json.loads((path / "zarr.json").read_bytes())["attributes"]
    rest = json.dumps({key: value for key, value in root.items() if key != "crc"}, sort_keys=True).encode()
    assert (root["format"], root["version"], crc(rest)) == ("ragged-trajectories", 6, root["crc"]), path
    lines = [file.read_bytes() for file in sorted((path / "catalog").glob("*.*")) if file.name != "zarr.json"]
    catalog = json.loads([line[9:-1] for line in lines if line[:9] == b"%08x " % crc(line[9:-1])][-1])
    rows_found, updates, newest, values, present, gone = [], [], {}, {}, {}, 0
    for ordinal, kind, salt, merged, count, _, accepted in catalog["segments"]:
        folder = path / f"seg-{ordinal:08d}{'-merged' * merged}"
        meta = json.loads((folder / "zarr.json").read_bytes())["attributes"]
        arrays, times = (read_files if root["backend"] == "memmap" else read_objects)(folder, meta, accepted)
        assert (meta["salt"], len(times) >= (count or 0)) == (salt, True), f"rows of {folder}"
        times = arrays["row_time"].tolist() if merged else times
        sources = meta["sources"] if merged else [[ordinal, len(times)]]
        ids = [(source << 32) + row for source, count in sources for row in range(count)]
        assert not merged or kind == "update" or ids == arrays["row_id"].tolist(), folder
        ids = arrays["row_id"].tolist() if merged else ids
        rows = [(*at, row, meta["schema"]["columns"], arrays) for row, at in enumerate(zip(times, ids, strict=True))]
        (rows_found if kind == "rows" else updates).extend(row for row in rows if row[0] >= 0)
        gone += sum(time < 0 for time in times) * (kind == "rows")
    for _, _, row, columns, arrays in sorted(updates, key=lambda at: at[:2]):
        newest |= {(c["name"], int(arrays["target"][row])): cell(c, arrays, row) for c in columns}
    rows = sorted(rows_found, key=lambda at: at[:2])[-(root["max_trajectories"] or 0) :]
    for column in catalog["schema"]["columns"]:
        name, values[column["name"]], present[column["name"]] = column["name"], [], []
        for _, row_id, row, columns, arrays in rows:
            late, bits = (name, row_id) in newest, optional(columns)
            is_present = name in arrays and (
                name not in bits or bool(int(arrays["present"][row]) >> bits.index(name) & 1)
            )
            values[name].append(newest[name, row_id] if late else cell(column, arrays, row))
            present[name].append(late or is_present)
    ids, total = [at[1] for at in rows], catalog["rows_gone"] + len(rows_found) + gone
    return {"ids": ids, "watermark": total, "values": values, "present": present}
