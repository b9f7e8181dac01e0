from __future__ import annotations

import itertools
import json
import math
import os
import resource

import pytest

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.rows import NewRows, StepRows

pytestmark = pytest.mark.timeout(40)  # a search that does not advance fails here, not after minutes


@pytest.fixture
def written(tmp_path):
    """Five rows, of different lengths."""
    rows = StepRows(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        rows.append({"step": step, "loss": 10.0**-step})
    return rows


def steps(rows: StepRows) -> list[int]:
    return [row["step"] for row in rows]


def test_rows_by_place_and_by_step(written):
    """The file is plain JSON lines; any row is found by its place or its step, from either end."""
    lines = [json.loads(line) for line in written.path.read_text().splitlines()]
    assert all(line.pop("crc32c") for line in lines)
    again = StepRows(written.path)
    assert list(again) == lines
    assert (len(again), again[0], again[-1], again[1:3]) == (5, lines[0], lines[4], lines[1:3])
    assert [again.of_step(step) for step in (0, 1, 5, 6)] == [None, lines[0], lines[4], None]
    assert (again.last_step, again.is_torn, list(again.problems())) == (5, False, [])
    assert [row["step"] for row in again.spread(3)] == [1, 3, 5]
    with pytest.raises(IndexError):
        _ = again[5]


def test_rows_that_do_not_begin_with_step_one(tmp_path):
    """A file that was begun later is searched by step, and a step that does not follow the last one is refused."""
    rows = StepRows(tmp_path / "ledger.jsonl")
    for step in (4, 5, 6):
        rows.append({"step": step})
    found = [rows.of_step(step) for step in (1, 3, 4, 5, 6, 7)]
    assert found == [None, None, {"step": 4}, {"step": 5}, {"step": 6}, None]
    with pytest.raises(DataError, match="step 9 does not follow step 6"):
        rows.append({"step": 9})


def test_every_row_of_a_long_file_is_found_where_it_starts(tmp_path):
    """400 rows whose lengths are far from even: the search returns the byte at which each line starts."""
    lines = [json.dumps({"step": step, "note": "x" * (step**2 % 331)}) + "\n" for step in range(11, 411)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(lines))
    starts = [0, *itertools.accumulate(map(len, lines))]
    rows = StepRows(path)
    assert [rows.start_of(step) for step in range(11, 412)] == starts
    assert [rows.required(step)["step"] for step in range(11, 411, 7)] == [*range(11, 411, 7)]


def test_lines_that_something_else_wrote(written):
    """A line without a checksum is a row; writing goes on behind it."""
    with written.path.open("ab") as file:
        file.write(b'{"step": 6}\n')
    again = StepRows(written.path)
    assert steps(again) == [1, 2, 3, 4, 5, 6]
    again.append({"step": 7})
    assert steps(StepRows(written.path)) == [1, 2, 3, 4, 5, 6, 7]
    assert list(again.problems()) == ["line 6 fails its checksum: it was truncated, changed or moved"]


def test_a_torn_tail_is_taken_off_before_the_next_row(written):
    """A line that a kill cut short is no row, and does not run into the next one."""
    with written.path.open("ab") as file:
        file.write(b'{"step": 6, "lo')
    again = StepRows(written.path)
    assert (len(again), again.is_torn) == (5, True)
    again.append({"step": 6})
    assert steps(StepRows(written.path)) == [1, 2, 3, 4, 5, 6]


def test_a_disk_that_is_full_takes_no_part_of_a_line(tmp_path):
    """The same step goes in later, once."""
    rows = StepRows(tmp_path / "ledger.jsonl")
    for step in range(1, 9):
        rows.append({"step": step})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rows.path.stat().st_size + 9, hard))
    try:
        with pytest.raises(OSError, match="no space left"):
            rows.append({"step": 9})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for step in (9, 10):
        rows.append({"step": step})
    for seen in (rows, StepRows(rows.path)):
        assert [row["step"] for row in seen] == list(range(1, 11))
        assert seen[-1] == {"step": 10}
        assert list(seen.problems()) == []


def test_a_power_loss_that_takes_lines_and_leaves_their_length(written):
    """Zeros are no row; the next row follows the last whole line."""
    size = written.path.stat().st_size
    os.truncate(written.path, written.start_of(4))
    os.truncate(written.path, size)
    again = StepRows(written.path)
    assert (len(again), again.last_step, again.is_torn) == (3, 3, True)
    again.append({"step": 4})
    assert steps(StepRows(written.path)) == [1, 2, 3, 4]


def test_rows_are_taken_off_from_a_step_on(written):
    """Later rows go with it, in the file and in the index; a step beyond the end changes nothing."""
    written.drop_from(6)
    assert len(written) == 5
    written.drop_from(3)
    assert steps(written) == steps(StepRows(written.path)) == [1, 2]
    written.append({"step": 3, "loss": 7.0})
    assert written.of_step(3) == {"step": 3, "loss": 7.0}
    assert list(StepRows(written.path).problems()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: lines[:2] + lines[3:],
        lambda lines: [*lines[:1], lines[1].replace(b"0.01", b"0.02"), *lines[2:]],
        lambda lines: [*lines[:2], lines[2][:8], *lines[3:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines, lines[2]],
    ],
    ids=["taken-out", "changed", "cut", "moved", "repeated"],
)
def test_damage_in_the_middle_is_seen_and_never_made_permanent(written, damage):
    """Each kind of change to what was written is named, and no row is added behind it."""
    written.path.write_bytes(b"".join(damage(written.path.read_bytes().splitlines(keepends=True))))

    try:
        found = list(StepRows(written.path).problems())
    except DataError as error:
        found = [str(error)]
    assert len(found) > 0


@pytest.mark.parametrize(
    ("found", "said"), [([1, 3], "line 2 is step 3"), ([1, 1], "line 2 is step 1"), ([2], "line 1")]
)
def test_lines_without_checksums_are_followed_by_their_steps(tmp_path, found, said):
    """Where no checksum says it, the steps say that lines are missing or repeated."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in found))
    (problem,) = StepRows(path).problems()
    assert problem.startswith(said)
    assert "lines are missing, repeated or moved" in problem


def test_a_line_that_is_no_row_is_named(tmp_path):
    """Damage where the index does not reach is an error with its line's number."""
    path = tmp_path / "metrics.jsonl"
    for content in (b'{"step": 1}\n{"step" 2}\n', b'{"step": 1}\n[]\n', b'{"step": 1}\n{"step": "2"}\n'):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"metrics\.jsonl:2: this line"):
            StepRows(path)


def test_a_changed_line_is_refused(written):
    """What a resume does: a digit changed in a line of the middle is an error."""
    written.path.write_bytes(written.path.read_bytes().replace(b"0.01", b"0.02"))
    with pytest.raises(DataError, match="line 2 fails its checksum"):
        StepRows(written.path).recheck()


def test_lines_that_were_taken_out_are_seen_at_the_end(written):
    """In constant time: the last line's checksum covers where it was."""
    lines = written.path.read_bytes().splitlines(keepends=True)
    written.path.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert StepRows(written.path).is_moved


def test_a_changed_line_is_not_given_out_as_a_row(written):
    """A digit that was changed in place leaves valid JSON; its checksum says that it is not what was written."""
    written.path.write_bytes(written.path.read_bytes().replace(b"0.01", b"0.02"))
    again = StepRows(written.path)
    with pytest.raises(DataError, match="line 2 fails its checksum"):
        again.of_step(2)
    assert again.of_step(3) == written.of_step(3)


def test_rows_behind_damage_are_not_added(written):
    """Where the file was edited, appending would make the damage permanent: it is refused."""
    lines = written.path.read_bytes().splitlines(keepends=True)
    written.path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(DataError, match="was edited or damaged"):
        StepRows(written.path).append({"step": 6})


def test_a_follower_returns_each_row_once(tmp_path):
    """Rows that were there count as seen; whole new ones are returned, also those that replace others."""
    rows, path = StepRows(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    early = NewRows(path)
    assert early.read() == []
    for step in range(1, 5):
        rows.append({"step": step, "task_reward": 0.5})
    new = NewRows(path)
    with path.open("ab") as file:
        file.write(b'{"step": 5, "ta')  # being written
    assert (new.read(), new.rows.last_step) == ([], 4)
    assert [row["step"] for row in early.read()] == [1, 2, 3, 4]
    rows.drop_from(3)
    rows.append({"step": 3, "task_reward": 0.75})
    for follower in (new, early):
        assert follower.read() == [{"step": 3, "task_reward": 0.75}]
        assert follower.rows.last_step == 3


def test_a_follower_sees_rows_go_before_others_come(tmp_path):
    """Between a resumed learner's taking rows off and its writing others, the last step is the last one there."""
    rows, path = StepRows(tmp_path / "metrics.jsonl"), tmp_path / "metrics.jsonl"
    for step in range(1, 5):
        rows.append({"step": step})
    new = NewRows(path)
    rows.drop_from(3)
    assert (new.read(), new.rows.last_step) == ([], 2)
    for step in (3, 4, 5):
        rows.append({"step": step})
    assert [row["step"] for row in new.read()] == [3, 4, 5]


def test_rows_come_back_as_written_and_nan_becomes_null(tmp_path):
    """JSON has no NaN and no infinity, however deep they stand."""
    rows = StepRows(tmp_path / "metrics.jsonl")
    assert not rows.path.exists()
    rows.append({"step": 1, "loss": 0.5})
    rows.append({"step": 2, "loss": math.nan, "nested": [math.inf, {"x": 1}]})
    assert list(rows) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "nested": [None, {"x": 1}]}]
