"""Trajectories as text."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_pipeline.cli import main
from rlhf_pipeline.exchange import TrajectoryRecorder
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.report.show import before_and_after, brief, full, typical_of_first_and_last
from rlhf_pipeline.report.stored import Stored
from rlhf_pipeline.report.tokens import TokenTexts
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.rows import StepRows
from tests.rlhf_pipeline.small import make_store
from trajectory_store import TrajectoryStore

from .conftest import write_run


def one(**changes: object) -> Answer:
    """Return a trajectory of two prompt tokens and two completion tokens."""
    return {
        "id": "7",
        "prompt": "a=",
        "completion": "bc",
        "answer": "bd",
        "error": None,
        "reward": 0.5,
        "advantage": -0.25,
        "group": 3,
        "version": 4,
        "newest": None,
        "tokens": 2,
        "steps": [2, 3],
        "spans": [],
        "engine": "",
        "temperature": None,
        "log_prob_mode": "",
        "finish": "length",
        "num_tokens": 4,
        "prompt_tokens": 2,
        "ids": [10, 11, 12, 13],
        "pieces": ["a", "=", "b", "c"],
        "mask": [0, 0, 1, 1],
        "log_probs": [None, None, math.log(0.5), math.log(0.25)],
        "ref": None,
        **changes,
    }


def test_full_shows_each_token():
    """Text, ids, who wrote a token, its log-prob and probability are shown, with the sum over the completion."""
    lines = list(full(one()))
    text = "\n".join(lines)
    assert "trajectory 7: group 3, policy version 4, finished by length" in text
    assert "reward 0.5000, advantage -0.2500, learned from in step 2, 3" in text
    assert "2 prompt tokens, 2 completion tokens, log-prob -2.08 in total, -1.04 per token" in text
    assert [line.split() for line in lines[-2:]] == [
        ["2", "12", "b", "policy", "-0.6931", "0.500"],
        ["3", "13", "c", "policy", "-1.3863", "0.250"],
    ]


def test_tokens_of_replies_are_neither_the_prompts_nor_the_policys():
    """After the prompt only what the policy produced is the completion's."""
    item = one(mask=[0, 0, 1, 0], log_probs=[None, None, math.log(0.5), None], tokens=1, steps=[])
    lines = list(full(item))
    assert "2 prompt tokens, 1 completion token, 1 token of replies, log-prob -0.69 in total" in "\n".join(lines)
    assert [line.split()[3] for line in lines[-3:]] == ["prompt", "policy", "reply"]
    assert list(brief([item]))[1].split()[3] == "1"
    assert "learned" not in "\n".join(lines)


def test_full_shows_the_reference():
    """With reference log-probs the k1 of each of the policy's tokens is shown."""
    lines = list(full(one(ref=(None, None, math.log(0.25), math.log(0.25)))))
    assert lines[-2].split()[-2:] == ["-1.3863", "0.6931"]
    assert lines[-1].split()[-1] == "0.0000"


def test_full_shows_which_weights_sampled_each_token():
    """A trajectory of several versions has them at its tokens; how it was sampled is shown where it is stored."""
    item = one(newest=6, spans=[[2, 4], [3, 6]], engine="vllm", log_prob_mode="processed", temperature=0.8)
    lines = list(full(item))
    assert "policy version 4-6, finished" in lines[0]
    assert "  sampled by vllm at temperature 0.8, processed log-probs" in lines
    assert "  weights: version 4 from place 2, version 6 from place 3" in lines
    assert [line.split()[4] for line in lines[-2:]] == ["4", "6"]
    assert [line.split()[-3:] for line in lines[-4:-2]] == [["prompt", "-", "-"]] * 2  # nobody's weights
    assert len({len(line) for line in lines[-5:]}) == 1
    assert list(brief([item]))[1].split()[2] == "4-6"


def test_full_leaves_out_what_is_too_long():
    """With a limit the completion's start is kept and what is left out is counted."""
    lines = list(full(one(), max_tokens=2))
    assert "2 tokens omitted; --full shows all" in lines[-1]
    long = one(ids=list(range(100)), pieces=["x"] * 100, mask=[0] * 90 + [1] * 10, log_probs=[-1.0] * 100)
    cut = list(full({**long, "num_tokens": 100, "prompt_tokens": 90}, max_tokens=64))
    assert [line.split()[0] for line in cut[-15:-1]] == [str(place) for place in range(86, 100)]


def test_failed_reward_is_explained():
    """A failed reward call shows its error."""
    assert any("it failed: ValueError: x" in line for line in full(one(error="ValueError: x")))


def test_control_characters_are_spelled_out():
    """A completion cannot send commands to the terminal."""
    item = one(completion="\x1b[2J\a", pieces=("a", "=", "\x1b", "\a"))
    text = "\n".join([*full(item), *brief([item])])
    assert "\x1b" not in text
    assert "\a" not in text
    assert "\\x1b[2J\\x07" in text


def test_brief_is_one_line_each():
    """Several trajectories are one line each, cut to the width of the terminal."""
    lines = list(brief([one(), one(id="8", completion="x\n" * 200)], width=90))
    assert len(lines) == 3
    assert all(len(line) <= 90 for line in lines)
    wide = list(brief([one(group=2**62), one()], width=110))
    assert len({line.index(word) for line, word in zip(wide, ("prompt", "a=", "a="), strict=True)}) == 1


def test_pieces_by_character_or_id(run_dir: Path):
    """Without a tokenizer a text with as many characters as tokens is taken apart; else ids are shown."""
    texts = TokenTexts(RunFolder.open(run_dir))
    assert texts.pieces([1, 2, 3], 2, "a=", "b") == ["a", "=", "b"]
    assert texts.pieces([9, 1, 2, 3, 8], 3, "a=", "b") == ["[9]", "a", "=", "b", "[8]"]
    assert texts.pieces([1, 2, 3], 1, "long prompt", "bcdef") == ["[1]", "[2]", "[3]"]


def test_pieces_by_tokenizer(run_dir: Path):
    """The tokenizer of the newest checkpoint is used where there is one."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = run_dir / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = TokenTexts(RunFolder.open(run_dir))
    assert texts.pieces([1, 0, 99], 1, "two", "one ?") == ["two", "one", "[99]"]


def test_a_store_alone_is_spelled_by_a_named_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`--tokenizer`, else the one that encoded the row's text; without either there are ids."""
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model, store, encoded = (str(tmp_path / name) for name in ("model", "store", "encoded"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(model)
    with TrajectoryRecorder(store) as recorder:
        recorder.record(prompt_ids=[[1]], completion_ids=[[0]], completions=["one"], rewards=[1.0])
    with TrajectoryRecorder(encoded, tokenizer=model) as recorder:
        recorder.record(prompts=["two"], completions=["one"], rewards=[1.0])

    def pieces(*args: str) -> list[str]:
        assert main(["show", *args, "--json"]) == 0
        return json.loads(capsys.readouterr().out)[0]["pieces"]

    assert pieces(store) == ["[1]", "[0]"]
    assert pieces(store, "--tokenizer", model) == ["two", "one"]
    assert pieces(encoded) == ["two", "one"]
    assert main(["show", store, "--tokenizer", str(tmp_path)]) == 2
    assert f"there is no tokenizer.json in {tmp_path}" in capsys.readouterr().err


def test_pieces_of_split_characters(run_dir: Path):
    """A token that is a part of a character is shown as its bytes: the euro sign is e2 82 ac."""
    euro = "\u00e2\u0124\u00ac"  # the three bytes in the alphabet of byte-level BPE
    tokenizer = Tokenizer(models.BPE(vocab={euro[0]: 0, euro[1]: 1, euro[2]: 2}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = run_dir / "checkpoints" / "step-00000010"
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert TokenTexts(RunFolder.open(run_dir)).pieces([0, 1, 2], 0, "", "") == ["\\xe2", "\\x82", "\\xac"]


def test_reads_a_trajectory_whole(run_dir: Path):
    """What was stored comes back: tokens, mask, log-probs without NaN, scalars and context."""
    view = View(run_dir)
    item = view.trajectory(47)
    view.close()
    assert (item["id"], item["group"], item["version"], item["newest"]) == ("47", 11, 10, None)
    assert "".join(item["pieces"]) == item["prompt"] + item["completion"]
    assert item["answer"] == item["completion"]
    assert item["log_probs"][:5] == [None] * 5
    assert item["ref"] is None


def test_typical_is_near_the_mean(run_dir: Path):
    """The shown completions are those nearest to their rollouts' means, of the first and the last version."""
    with Stored(run_dir / "store") as stored:
        pair = typical_of_first_and_last(stored)
        assert pair is not None
        rewards, versions = stored.scalars("task_reward"), stored.scalars("policy_version")
    assert rewards is not None
    assert versions is not None
    first = rewards[versions == 0]
    assert abs(rewards[pair[0]] - first.mean()) == pytest.approx(abs(first - first.mean()).min())
    assert versions[pair[1]] == 10


def test_before_and_after_are_of_one_prompt(tmp_path: Path):
    """Of the prompts that came early and at the end, the one whose rewards are nearest to the means of both versions.

    Means are 0.5 and 0.75. Alone, row 2 (0.5) and row 7 (0.75) are nearest, and are of two prompts; "a" is 0.5 and 0.25
    away, "b" 0.5 and 0.25, "c" 0 and 0.25, "d" is in version 1 only.
    """
    store = make_store(
        tmp_path / "whole", groups=(4, 4), rewards=[0, 1, 0.5, 0.5, 1, 0.5, 1, 0.75], versions=[0] * 4 + [1] * 4
    )
    with TrajectoryStore.open(store) as whole, TrajectoryStore.create(tmp_path / "store", whole.schema) as made:
        rows = dict(whole.read(whole.ids()))
        rows.pop("ids", None)
        made.append(rows | {"prompt": list("abcxabcd"), "completion": list("12345678")})
    with Stored(tmp_path / "store") as stored:
        assert typical_of_first_and_last(stored) == (2, 6)


def test_rewards_near_the_largest_have_a_typical_one(tmp_path: Path):
    """The mean of four times 3e38 is that, though the sum is more than a float32 holds."""
    path = make_store(tmp_path / "store", groups=(4, 4), rewards=[3e38] * 8, versions=[0] * 4 + [1] * 4)
    with Stored(path) as stored:
        assert typical_of_first_and_last(stored) == (0, 4)


def test_a_step_without_a_batch_is_reported(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing has been evicted where nothing was learned from."""
    StepRows(run_dir / "ledger.jsonl").append({"step": 13, "row_ids": [], "watermark": 48})
    assert main(["show", str(run_dir), "--step", "13"]) == 2
    assert "step 13 used no trajectory" in capsys.readouterr().err


def test_what_a_ring_has_evicted_is_not_shown(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    """Not even while its segment is there still: no other command would find it; the rest of a step is counted."""
    with TrajectoryStore.open(run_dir / "store") as store:
        rows, schema = store.read(store.ids()), store.schema
    shutil.rmtree(run_dir / "store")
    rows.pop("ids", None)
    with TrajectoryStore.create(run_dir / "store", schema, max_trajectories=12) as store:
        store.append(rows)
    assert main(["show", str(run_dir), "--step", "1"]) == 2
    assert "none of the 8 trajectories of step 1 is still in the store" in capsys.readouterr().err
    assert main(["show", str(run_dir), "--step", "9"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[1:5]] == ["36", "37", "38", "39"]
    assert "of the 8 trajectories of step 9, 4 were evicted" in shown


def test_before_and_after(run_dir: Path, tmp_path: Path):
    """Two aligned lines; nothing to compare after one rollout."""
    lines = before_and_after(RunFolder.open(run_dir))
    assert [line.split()[0] for line in lines] == ["before", "after", "(two"]
    assert lines[0].index("->") == lines[1].index("->")
    assert "reward 1.00" in lines[1]
    assert lines[2:] == ["  (two different prompts, because no early prompt occurs again at the end)"]
    assert before_and_after(RunFolder.open(write_run(tmp_path / "short", num_rollouts=1))) == []
