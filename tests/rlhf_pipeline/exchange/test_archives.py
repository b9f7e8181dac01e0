"""Archives of other tools: members compressed with zstd, archives within archives, and files that cannot be read."""

from __future__ import annotations

import gzip
import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import follow_folder, import_files
from trajectory_store import TrajectoryStore

GROUP = {"prompt_ids": [1, 2], "completion_ids": [[3], [4, 5]], "reward": [1.0, 0.0]}
LINE = (json.dumps(GROUP) + "\n").encode()


def zip_of(members: dict[str, bytes], method: int) -> bytes:
    """Return a zip archive with a compression method that this Python's zipfile may not write."""
    zstandard = pytest.importorskip("zstandard")
    data, entries = b"", b""
    for name, content in members.items():
        packed = zstandard.compress(content) if method == 93 else content
        sizes = struct.pack("<III", zlib.crc32(content), len(packed), len(content))
        common = struct.pack("<HHHHH", 63, 0, method, 0, 0) + sizes + struct.pack("<HH", len(name), 0)
        entries += (
            struct.pack("<IH", 0x02014B50, 63) + common + bytes(10) + struct.pack("<I", len(data)) + name.encode()
        )
        data += struct.pack("<I", 0x04034B50) + common + name.encode() + packed
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, len(members), len(members), len(entries), len(data), 0)
    return data + entries + end


def rewards(store: Path) -> list[float]:
    with TrajectoryStore.open(store, mode="r") as opened:
        return sorted(opened.read(opened.ids(), ["task_reward"])["task_reward"].tolist())


def test_a_log_whose_members_are_zstd(tmp_path: Path, chat_tokenizer: Any):
    """An `.eval` archive with zip method 93, as current Inspect writes it; the temperature is that of its plan."""
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]

    def sample(epoch: int, **fields: Any) -> bytes:
        scores = {"match": {"value": "C"}, "length": {"value": 1}}
        about = {"id": 1, "epoch": epoch, "input": "1+1", "target": "2", "messages": talk, "scores": scores}
        return json.dumps({**about, "output": {"choices": [{"stop_reason": "stop"}]}, **fields}).encode()

    header = {"version": 2, "eval": {"task": "sums"}, "plan": {"config": {"temperature": 0.7}}}
    members = {"header.json": json.dumps(header).encode(), "samples/1_epoch_1.json": sample(1)}
    members["samples/1_epoch_2.json"] = sample(2, error={"message": "RuntimeError: sandbox"}, scores={})
    (tmp_path / "log.eval").write_bytes(zip_of(members, 93))
    options: dict[str, Any] = {"tokenizer": chat_tokenizer, "fields": {"reward": "scores.match.value"}}
    import_files([tmp_path / "log.eval"], tmp_path / "store", **options)
    with TrajectoryStore.open(tmp_path / "store", mode="r") as store:
        rows = store.read(store.ids(), ["task_reward", "temperature", "failure_reason"])
    assert rows["temperature"].tolist() == pytest.approx([0.7, 0.7])
    assert rows["failure_reason"] == ["", "tool_error"]
    assert rows["task_reward"][0] == 1.0
    assert rows["task_reward"][1] != rows["task_reward"][1]


def test_a_changed_byte_in_a_zstd_member_is_reported(tmp_path: Path):
    """The checksum of the archive covers what zstd decompresses."""
    packed = bytearray(zip_of({"a.jsonl": LINE * 3}, 93))
    place = bytes(packed).index(b"PK\x01\x02") + 16  # of the checksum in the directory
    packed[place] ^= 1
    (tmp_path / "a.zip").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.zip/a\.jsonl does not match its checksum"):
        import_files([tmp_path / "a.zip"], tmp_path / "store")


def test_archives_within_archives_are_read(tmp_path: Path):
    """A zip in a zip, with a compressed member, is imported, and its rows name their place; a deep nest is rejected."""
    with zipfile.ZipFile(tmp_path / "inner.zip", "w") as archive:
        archive.writestr("b.jsonl.gz", gzip.compress(LINE.replace(b"1.0", b"0.5").replace(b"[1, 2]", b"[1, 6]")))
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as archive:
        archive.writestr("a.jsonl", LINE)
        archive.write(tmp_path / "inner.zip", "inner.zip")
    report = import_files([tmp_path / "outer.zip"], tmp_path / "store")
    assert report.num_imported == 4
    assert rewards(tmp_path / "store") == [0.0, 0.0, 0.5, 1.0]
    assert [str(file.path.relative_to(tmp_path)) for file in report.files] == [
        "outer.zip/a.jsonl",
        "outer.zip/inner.zip/b.jsonl.gz",
    ]
    nest = tmp_path / "outer.zip"
    for depth in range(4):
        deeper = tmp_path / f"nest{depth}.zip"
        with zipfile.ZipFile(deeper, "w") as archive:
            archive.write(nest, "in.zip")
        nest = deeper
    with pytest.raises(DefinitionError, match="nested in more than 4 archives"):
        import_files([nest], tmp_path / "deep")


@pytest.mark.parametrize("name", ["old.tar.gz", "old.tgz", "old.tar", "OLD.TAR.ZST"])
def test_a_tar_archive_is_reported(tmp_path: Path, name: str):
    """Beside other files, in a zip and while the folder is followed it is named as unread; alone it is an error."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(LINE)
    (folder / name).write_bytes(b"x" * 512)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in folder.iterdir():
            archive.write(file, file.name)
    for source in (folder, tmp_path / "all.zip"):
        report = import_files([source], tmp_path / "store")
        assert len(report.files) == 1
        assert [path.name for path in report.unreadable] == [name]
        assert f"{name} is a tar archive, which is not supported. Unpack it: tar -xf " in str(report.unreadable)
    unread: list[str] = []
    follow_folder(folder, tmp_path / "store", stop=lambda: True, on_unreadable=unread.append)
    assert len(unread) == 1
    assert name in unread[0]
    for alone in (folder / name, tmp_path / "alone"):
        if not alone.exists():
            alone.mkdir()
            (folder / name).rename(alone / name)
        with pytest.raises(DataError, match=r"is a tar archive, which is not supported"):
            import_files([alone], tmp_path / "other")


def test_one_truncated_dump_does_not_reject_its_folder(tmp_path: Path):
    """A `.pt` file that was cut is reported with the reason; the others of its folder are imported."""
    torch = pytest.importorskip("torch")
    sample = {"group_index": 0, "index": 0, "prompt": "a", "tokens": [1, 2, 3], "response": "b", "response_length": 2}
    sample |= {
        "label": None,
        "reward": 1.0,
        "loss_mask": None,
        "weight_versions": [],
        "rollout_log_probs": [-0.5, -1.0],
    }
    sample |= {"remove_sample": False, "status": "completed", "metadata": {}}
    samples = [sample, {**sample, "index": 1, "reward": 0.0}]
    torch.save({"rollout_id": 1, "samples": samples}, tmp_path / "1.pt")
    (tmp_path / "2.pt").write_bytes((tmp_path / "1.pt").read_bytes()[:300])
    report = import_files([tmp_path], tmp_path / "store")
    assert report.num_imported == 2
    assert len(report.unreadable) == 1
    assert "2.pt cannot be read" in next(iter(report.unreadable.values()))
