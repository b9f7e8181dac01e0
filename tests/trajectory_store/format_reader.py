"""An independent reader of the store's format, written from storage/FORMAT.md alone; it imports nothing of the store.

It is strict where the store is lenient: it checks every checksum, and damage of any kind raises `ValueError`.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zarr
from numcodecs import zstd

FORMAT = {"format": "ragged-trajectories", "version": 2}
RECORD = struct.Struct("<4sIQQIIQIIIIII")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Part = tuple[dict[str, np.ndarray], list[int]]  # the arrays of a segment, and the commit time of each row


def need(holds: Any, what: Any) -> None:
    if not holds:
        raise ValueError(f"damaged: {what}")


def optional(column: dict[str, Any]) -> bool:
    return "fill" in column or column.get("mutable", False)


def attributes(path: Path, role: str) -> dict[str, Any]:
    found = json.loads(path.read_bytes())["attributes"]
    need({**FORMAT, "role": role}.items() <= found.items(), path)
    return found


def read_catalog(folder: Path) -> dict[str, Any]:
    """The good record with the highest number."""
    for path in sorted(folder.glob("[0-9]*.rec"), key=lambda path: int(path.stem), reverse=True):
        for line in path.read_bytes().split(b"\n"):
            if line[:9] == b"%08x " % google_crc32c.value(line[9:]):
                record = json.loads(line[9:])
                need({**FORMAT, "role": "catalog", "number": int(path.stem)}.items() <= record.items(), path)
                return record
    raise ValueError(f"damaged: no record in {folder}")


def layout(meta: dict[str, Any]) -> dict[str, tuple[np.dtype, tuple[int, ...], str]]:
    """The arrays of a segment in the order of the format: dtype, shape of an element, and the axis they are along."""
    columns, found = meta["schema"]["columns"], {}
    for column in columns:
        dtype = np.dtype("u1" if column["dtype"] in ("str", "bytes") else column["dtype"]).newbyteorder("<")
        found[column["name"]] = (dtype, tuple(column.get("shape", ())), column.get("axis", ".rows"))
    found |= {f"{column['axis']}.offsets": (np.dtype("<i8"), (), ".edges") for column in columns if "axis" in column}
    if meta["kind"] == "rows" and any(optional(column) for column in columns):
        found["present"] = (np.dtype("<u8"), (), ".rows")
    extra = ["target"] * (meta["kind"] == "update") + ["row_id", "row_time"] * meta["merged"]
    return found | {name: (np.dtype("<i8"), (), ".rows") for name in extra}


def read_files(folder: Path, meta: dict[str, Any], ordinal: int, newest: int) -> Part:
    """A segment on a local disk."""
    about = google_crc32c.value((folder / "zarr.json").read_bytes())
    file = np.memmap(folder / "commits/c/0/0", mode="r")
    acknowledged, complement = struct.unpack("<QQ", (folder / "commits/acknowledged").read_bytes())
    records = [bytes(file[at : at + 64]) for at in range(0, min(len(file), 64 * (acknowledged + 66)), 64)]
    fields = [RECORD.unpack(record) for record in records]
    valid = [i for i, it in enumerate(fields) if it[:3] == (b"TRJ2", meta["salt"], i)
             and it[-1] == google_crc32c.value(records[i][:60])]  # fmt: skip
    may_lose = meta["durability"] != "power" and meta["boot_id"] != BOOT_ID.read_text().strip()
    need(acknowledged ^ complement == 2**64 - 1 and valid == list(range(len(valid))), f"{folder}: records")
    need(len(valid) >= acknowledged or (may_lose and meta["durability"] == "process"), f"{folder}: acknowledged")
    arrays, caps = {}, {".rows": meta["rows_cap"], ".edges": meta["rows_cap"] + 1, **meta["elems_cap"]}
    for name, (dtype, shape, axis) in layout(meta).items():
        chunk = folder / name / "/".join(["c", "0", *"0" * len(shape)])
        full = (caps[axis], *shape)
        arrays[name] = np.memmap(chunk, dtype, "r", shape=full) if caps[axis] else np.empty(full, dtype)
    times, end = [], {**dict.fromkeys(caps, 0), ".edges": 1}
    for _, _, i, time, rows, new, elements, kind, json_sum, own, seen, data_sum, _ in fields[: len(valid)]:
        start, end = end, {axis: int(arrays[f"{axis}.offsets"][rows]) for axis in meta["elems_cap"]}
        wanted = (sum(end.values()), start[".rows"] + new, 1 if new else 2, about, ordinal)
        need((elements, rows, kind, json_sum, own) == wanted and seen <= newest, f"{folder}: record {i}")
        end |= {".rows": rows, ".edges": rows + 1}
        written = [arrays[name][start[axis] : end[axis]].tobytes() for name, (_, _, axis) in layout(meta).items()]
        if google_crc32c.value(b"".join(written)) != data_sum:
            need(may_lose and (meta["durability"] == "process" or i >= acknowledged), f"{folder}: data of record {i}")
            end = start
            break
        times += [time] * new
    return {name: arrays[name][: end[axis]] for name, (_, _, axis) in layout(meta).items()}, times


def read_zip(data: bytes, meta: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The attributes and arrays of one commit object."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        entries = {info.filename: file.read(info) for info in file.infolist()}
    commit, arrays = json.loads(entries["zarr.json"])["attributes"], {}
    sizes = {axis: end - commit["starts"][axis] for axis, end in commit["ends"].items()}
    sizes |= {".rows": commit["n_rows"], ".edges": commit["n_rows"] + 1}
    for name, (dtype, shape, axis) in layout(meta).items() if commit["n_rows"] else ():
        raw = entries.get(f"{name}/" + "/".join(["c", "0", *"0" * len(shape)]), b"")
        if len(raw) != sizes[axis] * int(np.prod(shape)) * dtype.itemsize:
            raw = zstd.decompress(raw)
        need(google_crc32c.value(raw) == commit["crc"][name], f"{name} of commit {commit['seq']}")
        arrays[name] = np.frombuffer(raw, dtype).reshape(sizes[axis], *shape)
    return commit, arrays


def read_objects(folder: Path, meta: dict[str, Any], ordinal: int, newest: int) -> Part:
    """A segment of one object per commit, or a merged one of sharded arrays."""
    kinds = layout(meta)
    if meta["merged"]:
        sealed, arrays = meta["sealed"], {name: zarr.open_array(folder / name, mode="r")[...] for name in kinds}
        sizes = {".rows": sealed["rows"], ".edges": sealed["rows"] + 1, **sealed["ends"]}
        for name, (_, _, axis) in kinds.items():
            found = (google_crc32c.value(arrays[name].tobytes()), len(arrays[name]))
            need(found == (sealed["crc"][name], sizes[axis]), folder / name)
        return arrays, arrays["row_time"].tolist()
    pieces = {name: [np.zeros((int(axis == ".edges"), *shape), dtype)] for name, (dtype, shape, axis) in kinds.items()}
    times, ends = [], dict.fromkeys(meta["elems_cap"], 0)
    for seq, file in enumerate(sorted(folder.glob("[0-9]*.zip"))):
        commit, arrays = read_zip(file.read_bytes(), meta)
        times += [commit["time_ns"]] * commit["n_rows"]
        wanted = {**FORMAT, "role": "commit", "ordinal": ordinal, "seq": seq, "salt": meta["salt"], "starts": ends}
        need({**wanted, "rows_end": len(times)}.items() <= commit.items() and commit["catalog"] <= newest, file)
        need(file.name == f"{seq:08d}.zip", f"a gap before {file}")
        for name, array in arrays.items():
            pieces[name].append(array[1:] + ends[name[:-8]] if kinds[name][2] == ".edges" else array)
        ends = commit["ends"]
    return {name: np.concatenate(piece) for name, piece in pieces.items()}, times


def cell(column: dict[str, Any], arrays: dict[str, np.ndarray], row: int) -> Any:
    """The value that a segment holds, or the fill where it lacks the column."""
    name, dtype, axis, fill = column["name"], column["dtype"], column.get("axis"), column.get("fill")
    if name in arrays:
        value = arrays[name][slice(*arrays[f"{axis}.offsets"][row : row + 2]) if axis else row]
        return {"str": lambda: bytes(value).decode(), "bytes": lambda: bytes(value)}.get(dtype, lambda: value)()
    if dtype in ("str", "bytes"):
        return (fill or "") if dtype == "str" else (fill or "").encode()
    fill = float(fill["float"]) if isinstance(fill, dict) else fill or 0
    count = int(np.diff(arrays[f"{axis}.offsets"][row : row + 2])[0]) if f"{axis}.offsets" in arrays else 0
    return np.full((count, *column.get("shape", ())) if axis else (), fill, dtype)


def read_store(path: str | Path) -> dict[str, Any]:
    """`ids` in the order of arrival, `watermark`, and by column `values` and `present` in that order."""
    catalog = read_catalog(Path(path) / "catalog")
    try:
        return read_state(Path(path), catalog)
    except (ValueError, OSError):
        if read_catalog(Path(path) / "catalog")["number"] == catalog["number"]:
            raise
    return read_store(path)  # a merge or an eviction removed a segment while it was read


def read_state(path: Path, catalog: dict[str, Any]) -> dict[str, Any]:
    """The store as one record of its catalog says."""
    root = attributes(path / "zarr.json", "store")
    rest = json.dumps({key: value for key, value in root.items() if key != "crc"}, sort_keys=True)
    need(google_crc32c.value(rest.encode()) == root["crc"], path / "zarr.json")
    every: dict[str, list[tuple]] = {"rows": [], "update": []}
    for ordinal, kind, salt, merged, count, _ in catalog["segments"]:
        folder = path / f"seg-{ordinal:08d}{'-merged' * merged}"
        meta = attributes(folder / "zarr.json", "segment")
        need({"kind": kind, "salt": salt, "merged": merged}.items() <= meta.items(), folder)
        read = read_files if root["backend"] == "memmap" else read_objects
        arrays, times = read(folder, meta, ordinal, catalog["number"])
        need(len(times) >= (count or 0), f"rows of {folder}")
        times = arrays["row_time"].tolist() if merged else times
        addresses = arrays["row_id"].tolist() if merged else range(ordinal << 32, (ordinal << 32) + len(times))
        columns = meta["schema"]["columns"]
        every[kind] += [(*at, columns, arrays, row) for row, at in enumerate(zip(times, addresses, strict=True))]
    newest: dict[tuple[str, int], Any] = {}
    for _, _, columns, arrays, row in sorted(every["update"], key=lambda at: at[:2]):
        newest |= {(c["name"], int(arrays["target"][row])): cell(c, arrays, row) for c in columns}
    rows = sorted(every["rows"], key=lambda at: at[:2])[-(root["max_trajectories"] or 0) :]
    values, present = {}, {}
    for column in catalog["schema"]["columns"]:
        name, values[column["name"]], present[column["name"]] = column["name"], [], []
        for _, row_id, columns, arrays, row in rows:
            late = (name, row_id) in newest
            bits = [c["name"] for c in columns if optional(c)]
            given = name in arrays and (name not in bits or bool(int(arrays["present"][row]) >> bits.index(name) & 1))
            values[name].append(newest[name, row_id] if late else cell(column, arrays, row))
            present[name].append(late or given)
    total = catalog["rows_gone"] + len(every["rows"])
    return {"ids": [at[1] for at in rows], "watermark": total, "values": values, "present": present}
