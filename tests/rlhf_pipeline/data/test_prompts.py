from __future__ import annotations

import json

import pytest

from rlhf_pipeline import CopyDigits, JsonlPrompts
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_copy_digits_depends_on_seed_and_cursor_only():
    """The same seed and cursor give the same prompt; another seed or cursor gives another."""
    source = CopyDigits(num_digits=8)
    first = source.prompt(7, seed=1)
    assert first == CopyDigits(num_digits=8).prompt(7, seed=1)
    assert len({source.prompt(c, seed=s).text for c in range(50) for s in range(4)}) == 200
    assert first.text == f"{first.answer}="
    assert len(first.answer) == 8


def test_copy_digits_refuses_no_digits():
    """A task without digits is a mistake in the definition."""
    with pytest.raises(DefinitionError, match="num_digits is 0"):
        CopyDigits(num_digits=0)


def test_an_epoch_takes_every_line_once_in_a_new_order(tmp_path):
    """Cursors 0..n-1 are a permutation of the file, n..2n-1 another one."""
    path = tmp_path / "questions.jsonl"
    write_lines(path, [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(40)])
    source = JsonlPrompts(path=str(path))
    epochs = [[source.prompt(e * 40 + i, seed=3).text for i in range(40)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"q{i}" for i in range(40))
    assert epochs[0] != epochs[1]
    assert [source.prompt(i, seed=4).text for i in range(40)] != epochs[0]


def test_source_line_and_answer_travel_with_the_prompt(tmp_path):
    """A trajectory can be traced to the line of the file it came from."""
    path = tmp_path / "questions.jsonl"
    write_lines(path, [{"question": "1 + 1?", "answer": "#### 2"}])
    prompt = JsonlPrompts(path=str(path)).prompt(0, seed=0)
    assert (prompt.text, prompt.answer, prompt.meta) == ("1 + 1?", "#### 2", {"source_line": 1})


def test_a_line_that_is_not_json_is_named(tmp_path):
    """The message names the file, the line and the command that shows it."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\nquestion: q2\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"questions\.jsonl:2: this line is not JSON.*sed -n 2p /.*questions.jsonl`"):
        JsonlPrompts(path=str(path)).prompt(0, seed=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"qestion": "q", "answer": "a"}, "no field 'question'. Did you mean 'qestion'"),
        ({"question": 3, "answer": "a"}, "field 'question' must be text, got int"),
        ([1], "expected a JSON object"),
    ],
)
def test_a_line_of_the_wrong_shape_is_named(tmp_path, row, message):
    """A missing field, a number for text and a list for an object each get their own sentence."""
    path = tmp_path / "questions.jsonl"
    write_lines(path, [row])
    with pytest.raises(DataError, match=message):
        JsonlPrompts(path=str(path)).prompt(0, seed=0)


def test_missing_and_empty_files(tmp_path):
    """A missing file says how to point at one; an empty one says what it needs."""
    with pytest.raises(MissingPathError, match=r"--set prompts\.path="):
        JsonlPrompts(path=str(tmp_path / "none.jsonl")).prompt(0, seed=0)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match="holds no prompts"):
        JsonlPrompts(path=str(empty)).prompt(0, seed=0)


def test_gsm8k_reads_whole(gsm8k_dir):
    """All 7,473 real questions come out once in the first epoch."""
    source = JsonlPrompts(path=str(gsm8k_dir / "train.jsonl"))
    lines = {source.prompt(i, seed=0).meta["source_line"] for i in range(7473)}
    assert lines == set(range(1, 7474))
