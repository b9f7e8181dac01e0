"""FORMAT.md names what is on the disk."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

import trajectory_store
from trajectory_store import TrajectoryStore

from ._folders import SCHEMA, files, make, rows

PAGE = (Path(trajectory_store.__file__).resolve().parents[1] / "FORMAT.md").read_text(encoding="utf-8")
OF_ZARR = {
    *("zarr_format", "node_type", "attributes", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value"),
    *("codecs", "dimension_names", "storage_transformers", "consolidated_metadata", "name", "configuration"),
    *("chunk_shape", "separator", "endian", "level", "checksum", "index_codecs", "index_location", "must_understand"),
    *("metadata", "kind"),
}


def documents(path):
    """Every JSON object in the files of a store, in archives and behind other words of a line as well."""
    for file in files(path):
        raw = [file.read_bytes()]
        if zipfile.is_zipfile(file):
            archive = zipfile.ZipFile(file)
            raw = [archive.read(name) for name in archive.namelist() if name.endswith("json")]
        for data in raw:
            for text in (data, *(line[line.find(b"{") :] for line in data.split(b"\n"))):
                try:
                    found = json.loads(text)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    yield file.relative_to(path), found


def names(value):
    """Every key, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from names(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from names(inner)


@pytest.mark.parametrize("backend", ["memmap", "zarr"])
def test_every_name_on_the_disk_is_on_the_page(tmp_path, backend):
    """Each key of each JSON document is Zarr's own, a name of this store, or explained; so is each kind of file."""
    path = make(tmp_path / "s", backend, sessions=6, compact_after=4, max_trajectories=100, segment_rows=6)
    with TrajectoryStore.open(path, "a") as store:
        store.append(rows([90, 91]))
        own = {name for column in SCHEMA for name in (column.name, column.axis)} | {f"{a}.offsets" for a in SCHEMA.axes}
        explained = set(re.findall(r"[A-Za-z_][A-Za-z0-9_.-]*", PAGE))
        seen = 0
        for file, document in documents(path):
            unknown = {key for key in names(document) if not key.isdigit()} - OF_ZARR - own - explained
            unknown -= {key for key in unknown if key.split("/")[0] in own | explained}
            assert not unknown, f"{file}: FORMAT.md has no word about {sorted(unknown)}"
            seen += 1
        assert seen > 5
        for file in files(path):
            for part in file.relative_to(path).parts:
                word = re.split(r"[-.]?[0-9a-f]{4,}", part)[0].strip(".-")
                known = word in own | explained or not word or word.isdigit() or word in PAGE
                assert known, f"FORMAT.md has no word about {part} in {file}"
    version = json.loads((path / "zarr.json").read_bytes())["attributes"]["version"]
    assert f"version {version}" in PAGE.splitlines()[0]
