"""Imports that are stopped, repeated or wrong; and what a file may be."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, RunExistsError
from rlhf_pipeline.exchange import import_files
from trajectory_store import TrajectoryStore, diff

from .conftest import Write


def row(i: int, **more: Any) -> dict[str, Any]:
    """Return a row with token ids."""
    return {"prompt_ids": [i // 2], "completion_ids": [i, i + 1], "reward": i / 4} | more


def num_rows(store: Path) -> int:
    """Return the number of trajectories."""
    with TrajectoryStore.open(store) as opened:
        return len(opened)


def test_a_repeated_import_adds_nothing(tmp_path: Path, jsonl: Write):
    """The same command again skips what is there; a file that has grown gives its new rows."""
    file = jsonl(map(row, range(6)))
    assert import_files([file], tmp_path / "store", batch_rows=4).num_imported == 6
    again = import_files([file], tmp_path / "store", batch_rows=4)
    assert (again.num_imported, again.num_skipped) == (0, 6)
    file = jsonl(map(row, range(9)))
    grown = import_files([file], tmp_path / "store", batch_rows=4)
    assert (grown.num_imported, grown.num_skipped) == (3, 6)
    import_files([file], tmp_path / "at_once")
    with TrajectoryStore.open(tmp_path / "store") as left, TrajectoryStore.open(tmp_path / "at_once") as right:
        assert diff(left, right, key="trajectory_id").same


def test_a_broken_line_loses_nothing(tmp_path: Path, jsonl: Write):
    """A line that is no JSON is named; once mended, the same command imports the rest, each row once."""
    file = jsonl(map(row, range(7)))
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    file.write_text("".join([*lines[:5], lines[5][:20] + "\n", *lines[6:]]))
    with pytest.raises(DataError, match=r"rollouts\.jsonl:6: this line is not JSON"):
        import_files([file], tmp_path / "store", batch_rows=2)
    assert num_rows(tmp_path / "store") == 5
    file.write_text(whole)
    report = import_files([file], tmp_path / "store", batch_rows=2)
    assert (report.num_skipped, report.num_imported) == (5, 2)


def test_a_torn_last_line_may_be_at_work(tmp_path: Path, jsonl: Write):
    """A last line without an end is said to be perhaps still written, and goes on later."""
    file = jsonl(map(row, range(3)))
    whole = file.read_text()
    file.write_text(whole[:-20])
    with pytest.raises(DataError, match=r":3: .*its writer may still be writing it"):
        import_files([file], tmp_path / "store")
    file.write_text(whole)
    assert import_files([file], tmp_path / "store").num_imported == 1


@pytest.mark.parametrize(
    "change", [{"reward": 9.0}, {"log_probs": [-1.0, -2.5]}, {"advantage": 0.5}, {"finish_reason": "length"}]
)
def test_a_newer_version_of_a_row_supersedes_it(tmp_path: Path, jsonl: Write, change: dict[str, Any]):
    """Equal tokens with another value are a newer version under the same id; the older row stays, marked."""
    rows = [row(i, log_probs=[-1.0, -2.0], policy_version=3) for i in range(5)]
    import_files([jsonl(rows[:4])], tmp_path / "store")
    file = jsonl([rows[0], rows[1] | change, *rows[2:]])
    report = import_files([file], tmp_path / "store")
    assert (report.num_imported, report.num_skipped, report.files[0].num_superseded) == (2, 3, 1)
    with TrajectoryStore.open(tmp_path / "store") as store:
        stored = store.read(store.ids(), ["trajectory_id", "group_id", "superseded"])
    assert stored["trajectory_id"].tolist() == [0, 1, 2, 3, 1, 4]
    assert stored["superseded"].tolist() == [False, True, False, False, False, False]
    assert stored["group_id"].tolist() == [0, 0, 1, 1, 0, 2]
    assert import_files([file], tmp_path / "store").num_imported == 0


def test_the_older_version_does_not_come_back(tmp_path: Path, jsonl: Write):
    """A copy of the file before the change adds nothing and changes nothing."""
    old, new = jsonl([row(0), row(1)], "old.jsonl"), jsonl([row(0, reward=9.0), row(1)], "new.jsonl")
    for file in (old, new, old, new):
        import_files([file], tmp_path / "store")
    with TrajectoryStore.open(tmp_path / "store") as store:
        stored = store.read(store.ids(), ["task_reward", "superseded"])
    assert stored["task_reward"][~stored["superseded"]].tolist() == [0.25, 9.0]
    assert len(stored["superseded"]) == 3


def test_equal_rows_of_one_file_are_different_trajectories(tmp_path: Path, jsonl: Write):
    """Equal rows are counted within a file; a copy of it adds nothing, unless it is of another training."""
    files = [jsonl([*map(row, range(4)), row(0)], name) for name in ("a.jsonl", "b.jsonl")]
    report = import_files(files, tmp_path / "store", group="none")
    assert (report.num_imported, report.num_skipped) == (5, 5)
    assert import_files(files[1:], tmp_path / "store", group="none", source="second").num_imported == 5
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert len(set(store.read_scalars("trajectory_id").tolist())) == 10
    assert import_files(files[::-1], tmp_path / "store", group="none").num_skipped == 10


def test_into_a_store_that_holds_others(tmp_path: Path, jsonl: Write):
    """Rows of a run in the store keep their ids, and the import takes ids that none of them has."""
    from rlhf_pipeline.buffer.trajectory_schema import trajectory_schema

    with TrajectoryStore.create(tmp_path / "store", trajectory_schema()) as store:
        store.append({"input_ids": [[1], [2]], "trajectory_id": [0, 1], "group_id": [0, 5]})
    import_files([jsonl(map(row, range(4)))], tmp_path / "store")
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert store.read_scalars("trajectory_id").tolist() == [0, 1, *((1 << 40) + i for i in range(4))]
        assert store.read_scalars("group_id").tolist() == [0, 5, *((1 << 40) + i for i in (0, 0, 1, 1))]
    assert import_files([jsonl(map(row, range(4)))], tmp_path / "store").num_imported == 0


def test_groups_by_a_field(tmp_path: Path, jsonl: Write):
    """Rows in any order are groups by what a named field holds, which may be the prompt itself."""
    file = jsonl([row(i) for i in (0, 2, 1, 3)])
    import_files([file], tmp_path / "store", group="prompt_ids")
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert store.read_scalars("group_id").tolist() == [0, 1, 0, 1]


def test_a_group_that_is_nan(tmp_path: Path, jsonl: Write):
    """A missing number names no group: rows that have it are grouped by their prompts, not all together."""
    groups = [math.nan, math.nan, math.nan, math.nan, 1.0]
    rows = [row(i, group=group, finish_reason=math.nan) for i, group in enumerate(groups)]
    import_files([jsonl(rows)], tmp_path / "store")
    with TrajectoryStore.open(tmp_path / "store") as store:
        assert store.read_scalars("group_id").tolist() == [0, 0, 1, 1, 2]
        assert store.read(store.ids(), ["finish_reason"])["finish_reason"] == [""] * 5


def test_fields_by_name(tmp_path: Path, jsonl: Write):
    """A field named by hand wins over a known name; slips are answered with the nearest name."""
    file = jsonl([row(0, quality=0.75), row(1, quality=0.5)])
    report = import_files([file], tmp_path / "store", fields={"reward": "quality"})
    assert report.mean_reward == 0.625
    with pytest.raises(DataError, match=r":1: there is no field 'qualty'. Did you mean 'quality'"):
        import_files([file], tmp_path / "other", fields={"reward": "qualty"})
    with pytest.raises(DefinitionError, match=r"there is no target 'rewards'. Did you mean 'reward'"):
        import_files([file], tmp_path / "other", fields={"rewards": "quality"})


def test_a_field_that_is_missing_later_is_named(tmp_path: Path, jsonl: Write):
    """A row without a field that the first row has is named with its line."""
    broken = row(1)
    del broken["reward"]
    with pytest.raises(DefinitionError, match=r":2: there is no field for reward"):
        import_files([jsonl([row(0), broken])], tmp_path / "store")


def test_text_needs_a_tokenizer(tmp_path: Path, jsonl: Write):
    """Without a tokenizer, text is refused with the option to type."""
    with pytest.raises(DefinitionError, match=r":1: the rows have text but no token ids.*--tokenizer FOLDER"):
        import_files([jsonl([{"prompt": "a", "completion": "b", "reward": 1}])], tmp_path / "store")


def test_paths_that_are_not_what_they_must_be(tmp_path: Path, jsonl: Write):
    """Missing files, folders without files, unknown endings, JSON arrays and empty files are told apart."""
    jsonl([row(0)])
    with pytest.raises(
        MissingPathError,
        match=r"no file or folder at .*rollout.jsonl. Its parent folder contains: \['rollouts.jsonl'\]",
    ):
        import_files([tmp_path / "rollout.jsonl"], tmp_path / "store")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DefinitionError, match=r"contain no \.jsonl"):
        import_files([tmp_path / "empty"], tmp_path / "store")
    odd = tmp_path / "rollouts.txt"
    odd.write_text(json.dumps(row(0)))
    with pytest.raises(DefinitionError, match=r"--format jsonl"):
        import_files([odd], tmp_path / "store")
    assert import_files([odd], tmp_path / "odd", format="jsonl").num_imported == 1
    array = tmp_path / "array.json"
    array.write_text(json.dumps([row(0)], indent=1))
    assert import_files([array], tmp_path / "array").num_imported == 1
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text("\n")
    with pytest.raises(DataError, match=r"no rows to import"):
        import_files([nothing], tmp_path / "store")
    (tmp_path / "saved").mkdir()
    for name, about in (("dataset_info.json", {}), ("state.json", {"_data_files": []})):  # as datasets writes them
        (tmp_path / "saved" / name).write_text(json.dumps(about))
    with pytest.raises(DataError, match=r"no rows to import"):
        import_files([tmp_path / "saved"], tmp_path / "store")
    (tmp_path / "tiny-model").mkdir()
    with pytest.raises(MissingPathError, match=r"no tokenizer folder at .* Did you mean 'tiny-model'"):
        import_files([tmp_path / "rollouts.jsonl"], tmp_path / "store", tokenizer=str(tmp_path / "tiny-modl"))
    assert not (tmp_path / "store").exists()


def test_one_import_at_a_time(tmp_path: Path, jsonl: Write):
    """While another process imports into the store, a second import is refused."""
    file = jsonl([row(0)])
    import_files([file], tmp_path / "store")
    folder = os.open(tmp_path / "store", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(RunExistsError, match=r"another import is writing"):
            import_files([file], tmp_path / "store")
    finally:
        os.close(folder)


def test_rows_of_a_saved_dataset(tmp_path: Path):
    """A dataset of save_to_disk is read in batches; a folder of splits asks for one."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets are optional")
    made = datasets.Dataset.from_list([row(i) for i in range(5)])
    made.save_to_disk(str(tmp_path / "data"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "splits"))
    report = import_files([tmp_path / "data"], tmp_path / "store")
    assert (report.num_imported, report.num_groups, report.reward_sum) == (5, 3, 2.5)
    assert import_files([tmp_path / "splits" / "train"], tmp_path / "store").num_skipped == 5  # the same rows
    with pytest.raises(DefinitionError, match=r"several splits. Choose one: .*train"):
        import_files([tmp_path / "splits"], tmp_path / "store")


def test_another_tokenizer_does_not_go_on_with_an_import(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """A store never holds one file encoded in two ways."""
    rows = [{"prompt": "a", "completion": text, "reward": 1} for text in "bc"]
    import_files([jsonl(rows[:1])], tmp_path / "store", tokenizer=chat_tokenizer)
    with pytest.raises(DataError, match=r":1: this trajectory is already stored, encoded with a different tokenizer"):
        import_files([jsonl(rows)], tmp_path / "store", tokenizer=chat_tokenizer, chat_template=False)
    assert num_rows(tmp_path / "store") == 1


def test_what_is_left_out_is_counted_in_every_file(tmp_path: Path, jsonl: Write):
    """Each file has its own count."""
    export = {"schema_version": 1, "step": 0, "rank": 0, "env_name": "a", "export_sequence_idx": 0, "token_ids": [1, 2]}
    scores = {name: [0.0, -1.0] for name in ("advantages", "inference_logprobs", "trainer_logprobs")}
    export |= {"loss_mask": [0, 1], **scores}
    empty = export | {"loss_mask": [0, 0]}
    files = [jsonl([export, empty], "a.jsonl"), jsonl([empty, export, empty], "b.jsonl")]
    report = import_files(files, tmp_path / "store")
    assert [file.num_left_out for file in report.files] == [1, 2]
