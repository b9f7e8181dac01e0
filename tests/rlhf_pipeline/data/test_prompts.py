from __future__ import annotations

import datetime
import importlib
import json
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline import CopyDigits, Mix, Prompt, Prompts
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.data.prompts import ChosenPrompts, prompt_at
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
    source = Prompts(path=str(path))
    epochs = [[source.prompt(e * 40 + i, seed=3).text for i in range(40)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"q{i}" for i in range(40))
    assert epochs[0] != epochs[1]
    assert [source.prompt(i, seed=4).text for i in range(40)] != epochs[0]


def test_source_line_and_answer_travel_with_the_prompt(tmp_path):
    """A trajectory can be traced to the line of the file it came from."""
    path = tmp_path / "questions.jsonl"
    write_lines(path, [{"question": "1 + 1?", "answer": "#### 2"}])
    prompt = Prompts(path=str(path)).prompt(0, seed=0)
    assert (prompt.text, prompt.answer, prompt.meta) == ("1 + 1?", "#### 2", {"source_line": 1})


def test_a_line_that_is_not_json_is_named(tmp_path):
    """The message names the file, the line and the command that shows it."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\nquestion: q2\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"questions\.jsonl:2: this line is not JSON.*sed -n 2p /.*questions.jsonl`"):
        Prompts(path=str(path)).prompt(0, seed=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"qestion": "q", "answer": "a"}, "no field 'question'. Did you mean 'qestion'"),
        ({"question": 3, "answer": "a"}, "field 'question' must be text or a list of messages, got int"),
        ([1], "expected a JSON object"),
    ],
)
def test_a_line_of_the_wrong_shape_is_named(tmp_path, row, message):
    """A missing field, a number for text and a list for an object each get their own sentence."""
    path = tmp_path / "questions.jsonl"
    write_lines(path, [row])
    with pytest.raises(DataError, match=message):
        Prompts(path=str(path)).prompt(0, seed=0)


def test_missing_and_empty_files(tmp_path):
    """A missing file says how to point at one; an empty one says what it needs."""
    with pytest.raises(MissingPathError, match=r"--set prompts\.path="):
        Prompts(path=str(tmp_path / "none.jsonl")).prompt(0, seed=0)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match="has no prompts"):
        Prompts(path=str(empty)).prompt(0, seed=0)


def test_gsm8k_reads_whole(gsm8k_dir):
    """All 7,473 real questions come out once in the first epoch."""
    source = Prompts(path=str(gsm8k_dir / "train.jsonl"))
    lines = {source.prompt(i, seed=0).meta["source_line"] for i in range(7473)}
    assert lines == set(range(1, 7474))


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def test_columns_messages_and_nested_answers_reach_the_prompt():
    """A row as verl writes it: messages, an answer inside of an object, and every other column as meta."""
    row = {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": 2}, "extra": {"index": np.int64(7)}}
    prompt = Prompts(rows=[row], prompt_field="prompt", answer_field="reward_model.ground_truth").prompt(0, seed=0)
    assert (prompt.text, prompt.answer, prompt.messages) == ("1 + 1?", 2, tuple(CHAT))
    assert prompt.meta == {"reward_model": row["reward_model"], "extra": {"index": 7}, "source_line": 0}
    picked = Prompts(rows=[row], prompt_field="prompt", answer_field=None, meta_fields=("extra.index",))
    assert picked.prompt(0, seed=0).meta == {"extra.index": 7, "source_line": 0}


def test_a_system_message_goes_before_text_and_before_messages_without_one():
    """A row's own system message is kept."""
    rows = [{"question": "q", "answer": 1}, {"question": CHAT[1:], "answer": 1}, {"question": CHAT, "answer": 1}]
    prompts = Prompts(rows=rows, system="Think.").all_prompts()
    assert [prompt.messages and prompt.messages[0]["content"] for prompt in prompts] == [
        "Think.",
        "Think.",
        "Be brief.",
    ]
    with pytest.raises(DefinitionError, match="system is a chat message, so it needs as_chat=True"):
        Prompts(rows=rows, system="Think.", as_chat=False)


def test_text_parts_are_joined_and_null_columns_of_messages_are_dropped():
    """What Arrow and multimodal data sets make of messages is plain text again."""
    parts = [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?", "image": None}]
    [prompt] = Prompts(
        rows=[{"question": [{"role": "user", "content": parts, "tool_calls": None}], "answer": None}]
    ).all_prompts()
    assert (prompt.text, prompt.messages) == ("1 + 1?", ({"role": "user", "content": "1 + 1?"},))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "", "answer": 1}, "row 1: field 'question': the prompt is empty"),
        (
            {"question": " \n", "answer": 1},
            "row 1: field 'question': the prompt is empty or contains only whitespace. .* skip=.empty",
        ),
        (
            {"question": [{"role": "user", "content": " "}], "answer": 1},
            "row 1: field 'question': the prompt is empty or",
        ),
        ({"question": [], "answer": 1}, "row 1: field 'question': the prompt is empty: there are no messages"),
        ({"question": None, "answer": 1}, "row 1: field 'question' must be text or a list of messages, got NoneType"),
        ({"question": ["hi"], "answer": 1}, "row 1: field 'question': message 0 must be an object"),
        ({"question": [{"content": "hi"}], "answer": 1}, "row 1: field 'question': message 0 has no role"),
        (
            {"question": [*CHAT, {"role": "assistant", "content": "2"}], "answer": 1},
            "row 1: field 'question': the last message is from the assistant",
        ),
        (
            {"question": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "answer": 1},
            "row 1: field 'question': message 0 has content of type image; the policy reads only text",
        ),
        ({"question": "q"}, "row 1: there is no field 'answer'"),
        ({"question": "q", "answer": "\ud800"}, "row 1: 'answer' contains half of a surrogate pair"),
        (
            {"question": "q", "answer": 1, "image": b"GIF"},
            "row 1: 'image' is of type bytes, which JSON cannot represent",
        ),
    ],
)
def test_a_bad_row_is_refused_in_one_sentence_with_its_place(row, message):
    """Field and row are named, before anything is sampled."""
    with pytest.raises(DataError, match=message):
        Prompts(rows=[{"question": "q", "answer": 1}, row]).prompt(0, seed=0)


def test_a_column_of_bytes_has_a_way(tmp_path):
    """The message names `meta_fields` with the other columns; with them the file is read."""
    pyarrow = pytest.importorskip("pyarrow")
    file = tmp_path / "images.parquet"
    table = pyarrow.table({"question": ["q"], "answer": ["1"], "level": [3], "image": [b"GIF"], "topic": ["sums"]})
    importlib.import_module("pyarrow.parquet").write_table(table, file)
    with pytest.raises(DataError, match=r"'image' is of type bytes.*--set prompts\.meta_fields=level,topic$"):
        Prompts(path=str(file)).prompt(0, seed=0)
    assert Prompts(path=str(file), meta_fields=("level", "topic")).prompt(0, seed=0).meta["topic"] == "sums"


def test_rows_are_left_out_by_named_rules_alone_and_counted():
    """Empty prompts and missing answers, each under its rule."""
    rows = [{"question": "q", "answer": 1}, {"question": " ", "answer": 1}, {"question": "q"}, {"question": None}]
    source = Prompts(rows=rows, skip=("empty", "no_answer"))
    assert (len(source.all_prompts()), source.skipped()) == (1, {"empty": 2, "no_answer": 1})
    with pytest.raises(DefinitionError, match=r"Prompts\.skip is "):
        Prompts(rows=rows, skip="bad")  # pyright: ignore[reportArgumentType]


def test_rows_in_memory_are_recorded_by_their_digest():
    """A definition with rows is written as their number and digest, and other rows differ."""
    datasets = pytest.importorskip("datasets")
    rows = [{"question": "q", "answer": 1}]
    source = Prompts(rows=datasets.Dataset.from_list(rows))
    assert source == Prompts(rows=rows) != Prompts(rows=[{"question": "r", "answer": 1}])
    recorded = to_json(source)["rows"]
    assert {**recorded, "sha256": ""} == {"type": "RowsInMemory", "num_rows": 1, "sha256": ""}
    assert json.loads(json.dumps(recorded)) == recorded


def test_a_mixture_keeps_its_weights_everywhere_and_its_sources_in_order():
    """Every prefix of the order has each source's share up to one prompt, and each source's prompts come one by one."""
    sources = (CopyDigits(num_digits=2), CopyDigits(num_digits=3), CopyDigits(num_digits=5))
    weights = (0.5, 0.3, 0.2)
    given = [Mix(sources, weights=weights).prompt(cursor, seed=1) for cursor in range(200)]
    for taken in range(1, 201):
        for source, weight in zip(sources, weights, strict=True):
            count = sum(len(prompt.answer) == source.num_digits for prompt in given[:taken])
            assert abs(count - weight * taken) <= 1.5
    own = [prompt for prompt in given if len(prompt.answer) == 3]
    assert own == [sources[1].prompt(cursor, seed=1) for cursor in range(len(own))]
    with pytest.raises(
        DefinitionError, match="weights must be empty or contain one value per source: expected 3, got 1"
    ):
        Mix(sources, weights=(1,))


class Own:
    """A finite source with values as people have them."""

    def __len__(self) -> int:
        return 5

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return one of five prompts."""
        meta = {"level": np.int64(cursor), "on": datetime.date(2024, 5, cursor + 1), "scores": np.array([0.5])}
        return Prompt(text=["a", "b", "c", "d", "e"][cursor], answer=np.float32(0.5), meta=meta)


def test_a_finite_source_of_ones_own_is_taken_epoch_by_epoch():
    """Each epoch is a shuffle of all its prompts; NumPy numbers and dates become JSON."""
    epochs = [[prompt_at(Own(), epoch * 5 + at, seed=2).text for at in range(5)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == ["a", "b", "c", "d", "e"]
    assert epochs[0] != epochs[1]
    prompt = Own().prompt(2, 0)
    assert json.loads(json.dumps(prompt.meta)) == {"level": 2, "on": "2024-05-03", "scores": [0.5]}
    assert prompt.answer == 0.5


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda cursor: [Prompt(text="a")][cursor], "has no prompt 1 .*define its __len__ method"),
        (lambda cursor: "text", "returned str; it must return an rlhf_pipeline.Prompt"),
        (lambda cursor: {}["x"], r"prompt\(1, 0\) raised KeyError"),
        (
            lambda cursor: Prompt(text="a", meta={"x": object()}),
            "meta 'x' is of type object, which JSON cannot represent",
        ),
    ],
)
def test_what_a_source_of_ones_own_does_wrong_is_one_sentence(returns, message):
    """The end of the data, another type, an error of its own, a value that cannot be stored."""
    source: Any = type("Own", (), {"as_chat": False, "prompt": lambda self, cursor, seed: returns(cursor)})()
    with pytest.raises((DefinitionError, DataError), match=message):
        prompt_at(source, 1, seed=0)


class InOrder:
    """A finite source of one's own that is not shuffled."""

    shuffle = False

    def __len__(self) -> int:
        return 3

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return a letter."""
        return Prompt(text="abc"[cursor])


@pytest.mark.parametrize("kind", ["rows", "own", "chosen", "mixed"])
def test_an_order_that_is_not_shuffled(kind):
    """In their order, epoch after epoch, whatever the seed: rows, one's own source, those that fit, in a mix."""
    options: dict[str, Any] = {"shuffle": False, "answer_field": None}
    rows = Prompts(rows=[{"question": text} for text in "abc"], **options)
    more = Prompts(rows=[{"question": text} for text in "xabc"], **options)
    sources = {"rows": rows, "own": InOrder(), "chosen": ChosenPrompts(source=more, positions=(1, 2, 3))}
    source: Any = Mix((rows,)) if kind == "mixed" else sources[kind]
    for seed in (0, 5):
        assert "".join(prompt_at(source, cursor, seed).text for cursor in range(7)) == "abcabca"
