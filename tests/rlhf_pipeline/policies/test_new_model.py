"""Checkpoints and policies made from scratch."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from rlhf_pipeline import CausalLMPolicy, scratch_policy
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError
from rlhf_pipeline.policies.chat import encode_prompt
from rlhf_pipeline.policies.new_model import NewModel, new_model

SMALL = {"vocab_size": 300, "hidden_size": 16, "num_layers": 1, "num_heads": 2}


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text file of a few lines."""
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox\nhello hello hello 1234\n" * 10, encoding="utf-8")
    return path


def test_a_checkpoint_that_loads_and_generates(text_file: Path, tmp_path: Path) -> None:
    """The folder loads as a policy, with distinct end and padding tokens and a working chat template."""
    made = new_model(tmp_path / "a" / "model", text_file=text_file, **SMALL)
    assert isinstance(made, NewModel)
    policy = CausalLMPolicy.from_pretrained(made.folder, max_new_tokens=5)
    assert policy.vocab_size == made.vocab_size == len(policy.tokenizer) <= 300
    assert made.num_parameters == sum(p.numel() for p in policy.parameters())
    assert policy.eos_token_ids == (policy.tokenizer.eos_token_id,)
    assert policy.pad_token_id == policy.tokenizer.pad_token_id != policy.tokenizer.eos_token_id
    assert (made.folder / "model.safetensors").is_file()
    prompt = encode_prompt(policy.tokenizer, "hello")
    assert len(policy.generate_groups([prompt], group_size=2, seed=0)) == 2
    assert [p.name for p in made.folder.parent.iterdir()] == ["model"]


def test_any_text_survives_the_tokenizer(text_file: Path, tmp_path: Path) -> None:
    """Bytes cover every character, here and through AutoTokenizer, with equal ids; digits are single tokens."""
    made = new_model(tmp_path / "m", text_file=text_file, **SMALL)
    ours = CausalLMPolicy.from_pretrained(made.folder).tokenizer
    auto = AutoTokenizer.from_pretrained(made.folder, local_files_only=True)
    for text in ("hello  world", "\n\n tab\t", "日本語 é 🙂", "12345", "don't <x>"):
        ids = ours.encode(text)
        assert ours.decode(ids) == text
        assert auto.encode(text) == ids
        assert max(ids) < made.vocab_size
    assert len(ours.encode("12345")) == 5


def test_jsonl_trains_on_every_string(tmp_path: Path) -> None:
    """Strings of all fields count, nested ones too; numbers and keys do not."""
    path = tmp_path / "rows.jsonl"
    rows = [{"q": "zebra zebra zebra", "n": 1, "messages": [{"content": "yodel yodel yodel"}]}] * 5
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n", encoding="utf-8")
    made = new_model(tmp_path / "m", text_file=path, **SMALL)
    assert made.num_texts == 10
    tokenizer = CausalLMPolicy.from_pretrained(made.folder).tokenizer
    assert len(tokenizer.encode(" zebra")) == 1
    assert len(tokenizer.encode(" yodel")) == 1


def test_the_seed_decides_the_weights(text_file: Path, tmp_path: Path) -> None:
    """Equal seeds give equal files; another seed another model; the global generator is left alone."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        new_model(tmp_path / name, text_file=text_file, seed=seed, **SMALL)
    assert torch.equal(torch.get_rng_state(), state)
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() != (tmp_path / "c" / "model.safetensors").read_bytes()


def test_a_taken_folder_is_refused_and_left_alone(text_file: Path, tmp_path: Path) -> None:
    """A non-empty folder stays as it was; an empty one is used."""
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "precious").write_text("x")
    with pytest.raises(DefinitionError, match="already exists"):
        new_model(taken, text_file=text_file, **SMALL)
    assert [p.name for p in taken.iterdir()] == ["precious"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert new_model(empty, text_file=text_file, **SMALL).folder == empty


def test_bad_arguments_leave_nothing_behind(text_file: Path, tmp_path: Path) -> None:
    """Sizes, a missing file, a broken line, no text, not UTF-8: the message says where, and no folder appears."""
    target = tmp_path / "out" / "m"
    with pytest.raises(DefinitionError, match="at least 259"):
        new_model(target, text_file=text_file, vocab_size=100)
    with pytest.raises(DefinitionError, match="hidden_size is 15"):
        new_model(target, text_file=text_file, hidden_size=15)
    with pytest.raises(DefinitionError, match="num_layers is 0"):
        new_model(target, text_file=text_file, num_layers=0)
    with pytest.raises(MissingPathError, match=r"no text file at .*nothing\.txt"):
        new_model(target, text_file=tmp_path / "nothing.txt")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"a": "b"}\n{oops\n')
    with pytest.raises(DataError, match=r"line 2 of .*broken\.jsonl is not JSON"):
        new_model(target, text_file=broken)
    blank = tmp_path / "blank.txt"
    blank.write_text("\n\n")
    with pytest.raises(DataError, match="no text"):
        new_model(target, text_file=blank)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        new_model(target, text_file=latin)
    assert not target.parent.exists()


def test_real_questions_fill_the_vocabulary(gsm8k_dir: Path, tmp_path: Path) -> None:
    """GSM8K's training file gives the whole vocabulary."""
    made = new_model(tmp_path / "m", text_file=gsm8k_dir / "train.jsonl", hidden_size=32, num_layers=1)
    assert made.vocab_size == 4096
    tokenizer = CausalLMPolicy.from_pretrained(made.folder).tokenizer
    line = json.loads((gsm8k_dir / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    text = next(v for v in line.values() if isinstance(v, str))
    assert len(tokenizer.encode(text)) < len(text) / 3


def test_a_policy_over_an_alphabet() -> None:
    """One token per character; ids in the alphabet's order after padding and end."""
    policy = scratch_policy("0123456789=", hidden_size=32, num_layers=1, num_heads=2, seed=4, temperature=0.5)
    assert policy.vocab_size == 13
    assert policy.eos_token_ids == (1,)
    assert policy.pad_token_id == 0
    assert policy.temperature == 0.5
    assert policy.tokenizer.encode("0=9") == [2, 12, 11]
    assert policy.tokenizer.decode([2, 12, 11, 1], skip_special_tokens=True) == "0=9"


def test_any_character_may_be_in_the_alphabet() -> None:
    """Spaces, line ends and characters of several bytes are characters like any other."""
    policy = scratch_policy(" \n\té.日")
    text = "日 é\n\t.."
    assert policy.tokenizer.decode(policy.tokenizer.encode(text)) == text
    assert len(policy.tokenizer.encode(text)) == len(text)


def test_scratch_policies_follow_the_seed() -> None:
    """Equal seeds give equal weights."""
    a, b, c = (scratch_policy("01", seed=s) for s in (0, 0, 1))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head_weight, c.head_weight)


def test_a_saved_scratch_policy_keeps_its_tokenizer(tmp_path: Path) -> None:
    """Through our loader and through AutoTokenizer the ids stay the same."""
    policy = scratch_policy("01= ")
    policy.save_pretrained(tmp_path / "m")
    ids = policy.tokenizer.encode("1 = 0")
    assert CausalLMPolicy.from_pretrained(tmp_path / "m").tokenizer.encode("1 = 0") == ids
    assert AutoTokenizer.from_pretrained(tmp_path / "m", local_files_only=True).encode("1 = 0") == ids


def test_bad_alphabets_are_refused() -> None:
    """Empty, or with a character twice."""
    for alphabet in ("", "aba"):
        with pytest.raises(DefinitionError, match="list every character once"):
            scratch_policy(alphabet)
    with pytest.raises(DefinitionError, match="hidden_size is 10"):
        scratch_policy("ab", hidden_size=10, num_heads=4)


def test_a_line_without_spaces_costs_no_more_than_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """300,000 letters in one word take seconds, not minutes; it is said that the word was cut."""
    text = tmp_path / "letters.txt"
    text.write_text("".join(random.Random(0).choices("abcdefghij", k=300_000)))
    new_model(tmp_path / "model", text_file=text, **SMALL)
    assert "a line of 300000 characters has more than 1000 characters without a space" in caplog.text
