from __future__ import annotations

import json
import shutil
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from tensordict import lazy_stack

from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.report.check import check_run
from rlhf_pipeline.run.events import Event, StepDone
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.repeated_rows import check_repeated
from rlhf_pipeline.run.start import run
from tests.damage import flip_first, flip_value
from tests.rlhf_pipeline.small import changed, tiny, trajectory, weights
from trajectory_store import CorruptionError, TrajectoryStore
from trajectory_store.format import ORDINAL_SHIFT

PIPELINE = tiny(collect__prompts_per_rollout="2", buffer__max_staleness="0", learn__epochs="1", learn__steps="4")
"""8 trajectories a step, and a checkpoint every 2 steps."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(PIPELINE, run_dir=folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """Without its newest checkpoint: steps 3 and 4 are taken again."""
    folder = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    return folder


@pytest.mark.parametrize("column", ["input_ids", "assistant_mask", "advantage", "policy_version", "trajectory_id"])
def test_rows_that_were_damaged_since_are_not_learned_from_again(copied, column):
    """One flipped bit in what step 3 or 4 used: the resume names it and changes nothing, and so does `verify`."""
    flip_value(copied / "store", column, 20)
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(DataError, match=r"step 3 would use corrupted.*trajectories 16, .*seg-") as e:
        run(PIPELINE, run_dir=copied, resume=True)
    assert f"rlhf-pipeline run --from {copied}@2" in str(e.value)
    kept = {path for path in before if path.parts[-3:][0] == "checkpoints" or path.name == "ledger.jsonl"}
    assert {path: path.read_bytes() for path in kept} == {path: before[path] for path in kept}


def test_damage_in_rows_that_no_step_uses_again_stops_nothing(copied, finished):
    """A flip in the rows of step 1 does not reach the weights, which end as they were."""
    flip_value(copied / "store", "input_ids", 4)
    run(PIPELINE, run_dir=copied, resume=True)
    same = [(folder / "checkpoints/step-00000004/model.safetensors").read_bytes() for folder in (copied, finished)]
    assert same[0] == same[1]


def test_damage_that_makes_an_old_row_young_again_stops_the_step(copied):
    """The rows of step 3 are whole, and a row of step 1 claims to be of its weights: not the rows of the ledger."""
    with TrajectoryStore.open(copied / "store") as opened:
        assert int(opened.read_scalars("policy_version", opened.ids()[:1])[0]) == 0
    (file,) = (copied / "store").glob("seg-*/policy_version/c/0")
    with file.open("r+b") as stream:
        stream.write(b"\x02")
    with pytest.raises(DataError, match=r"step 3 would use corrupted.*trajectory 0 "):
        run(PIPELINE, run_dir=copied, resume=True)


def test_a_repeated_row_that_arrived_late_is_checked(tmp_path, monkeypatch):
    """The row of a writer whose clock is behind comes before rows of an earlier step; only the ledger names it."""
    path, now = tmp_path / "store", time.time_ns
    with closing(TrajectoryStorage(path, backend="zarr")) as late, closing(TrajectoryStorage(path)) as punctual:
        for number, storage in enumerate((late, punctual, late, punctual)):
            monkeypatch.setattr(time, "time_ns", lambda behind=10**12 * (storage is late): now() - behind)
            storage.extend(lazy_stack([trajectory(number, [0, 1, 1], 1.0, version=number // 2)]))
    second = 1 << ORDINAL_SHIFT
    steps = [
        {"step": 1, "row_ids": [0, second], "watermark": 2},
        {"step": 2, "row_ids": [1, second + 1], "watermark": 4},
    ]
    (tmp_path / "ledger.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    flip_first(path / "seg-00000000", "policy_version", number=1, is_archived=True)
    with closing(TrajectoryStorage(path, mode="r")) as storage:
        assert storage.store.ids().tolist() == [0, 1, second, second + 1]
        with pytest.raises(CorruptionError, match=r"trajectory 1 .*seg-00000000"):
            check_repeated(RunFolder(tmp_path), storage, 1, max_staleness=0)


DRAWN = tiny(
    sample__strategy="uniform",
    sample__batch_size="6",
    buffer__max_staleness="8",
    collect__prompts_per_rollout="2",
    learn__epochs="1",
    learn__steps="4",
)
"""Steps draw from all rollouts so far."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "run"
    run(DRAWN, run_dir=folder)
    return folder


@pytest.mark.parametrize("column", ["policy_version", "task_reward", "assistant_mask", "prompt"])
def test_a_row_of_before_the_checkpoint_is_not_drawn_unchecked(drawn, tmp_path, column):
    """Steps after a checkpoint draw older rows for the first time: a flip in one of them stops the resume by name."""
    folder = shutil.copytree(drawn, tmp_path / "run")
    flip_value(folder / "store", column, 3)
    longer = changed(DRAWN, learn__steps="6")
    with pytest.raises(DataError, match=r"step 5 would use .*trajectories 0, 1, .* cannot be read: seg-"):
        run(longer, run_dir=folder, resume=True)
    assert len(RunFolder(folder).metrics) == 4


def test_a_row_that_the_store_does_not_serve_any_more_is_missed(drawn, tmp_path):
    """A column that is gone takes rows of before the checkpoint out of the store: the resume names the segment."""
    folder = shutil.copytree(drawn, tmp_path / "run")
    (file,) = (folder / "store").glob("seg-*/tokens.offsets/c/0")
    file.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the store says on opening which rows it does not serve
        with pytest.raises(DataError, match=r"step 5 would use .*32 of the trajectories 0 to 31 cannot be read: seg-"):
            run(changed(DRAWN, learn__steps="6"), run_dir=folder, resume=True)


def test_an_edited_record_is_refused_by_name(drawn, tmp_path):
    """A digit of a recorded setting: the run does not go on with another one."""
    folder = shutil.copytree(drawn, tmp_path / "run")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"lr": 0.01', '"lr": 0.81'))
    with pytest.raises(DataError, match=r"config\.json fails its checksum.*--resume --set"):
        run(DRAWN, run_dir=folder, resume=True)


def test_damage_while_the_run_continues_stops_the_next_step_that_would_use_it(tmp_path):
    """The weights stay those of the step before, and the run goes on when the file is put back."""
    folder, all_rows = tmp_path / "run", changed(DRAWN, sample__batch_size="64")
    run(changed(all_rows, learn__steps="2"), run_dir=folder)
    (file,) = (folder / "store").glob("seg-*/input_ids/c/0")
    before = file.read_bytes()

    def damage(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3:
            file.write_bytes(bytes([before[0] ^ 1]) + before[1:])
            time.sleep(0.6)  # the time of a file has a resolution, and is looked at now and then

    with pytest.raises(DataError, match=r"step 4 would use .*corrupted.*run@2 --out"):
        run(all_rows, run_dir=folder, resume=True, on_event=damage)
    assert len(RunFolder(folder).metrics) == 3
    file.write_bytes(before)
    run(all_rows, run_dir=folder, resume=True)
    run(all_rows, run_dir=tmp_path / "straight")
    assert weights(folder) == weights(tmp_path / "straight")


@pytest.mark.parametrize(("name", "digit"), [("ledger", b'"seed":'), ("metrics", b'"num_trajectories":')])
def test_a_changed_line_before_the_checkpoint_stops_the_resume(copied, name, digit):
    """A digit of step 1's line: no later step reads it, and yet the run does not go on with it."""
    file = copied / f"{name}.jsonl"
    content = bytearray(file.read_bytes())
    content[content.index(digit) + len(digit)] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DataError, match=rf"{name}\.jsonl: line 1 fails its checksum"):
        run(PIPELINE, run_dir=copied, resume=True)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("metrics.jsonl", "in metrics.jsonl"),
        ("ledger.jsonl", "in ledger.jsonl"),
        ("checkpoints/step-00000002", "in ledger.jsonl and metrics.jsonl"),
    ],
)
def test_a_part_of_another_run_stops_the_resume_and_is_named(copied, tmp_path, part, named):
    """Whole by its own checksums, and of as many steps: the checkpoint and the lines do not fit each other."""
    run(PIPELINE, run_dir=tmp_path / "other", seed=7)
    (shutil.rmtree if (copied / part).is_dir() else Path.unlink)(copied / part)
    (shutil.copytree if (tmp_path / "other" / part).is_dir() else shutil.copyfile)(
        tmp_path / "other" / part, copied / part
    )
    with pytest.raises(DataError, match=rf"step-00000002 does not match its run: .*line for step 2 {named}"):
        run(PIPELINE, run_dir=copied, resume=True)
    said = [finding.text for finding in check_run(RunFolder.open(copied)) if not finding.ok]
    assert any("step-00000002: the line for step 2" in text for text in said), said
