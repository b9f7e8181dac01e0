"""Rows by the names of their fields, and what is wrong with them named; TRL's tables, tinker's and GSM8K's files."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import import_files
from rlhf_pipeline.exchange.tools import find_tool
from trajectory_store import TrajectoryStore

from .conftest import Write

NAN = math.nan


def rows_of(store: Path) -> dict[str, Any]:
    """Return all columns of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read(opened.ids())


def same(row: np.ndarray, wanted: list[float]) -> bool:
    """Return True if a row of scores is `wanted`, NaN included."""
    return np.array_equal(row, np.array(wanted, np.float32), equal_nan=True)


def test_prompts_and_completions_of_any_file(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Text is encoded once, without an end token that nobody sampled; numbers may be text, and fields nested."""
    rows = [("1+1=", "2", "1"), ("1+1=", "33", 0.25), ("2+2=", "4", "true"), ("3+3=", "2", None)]
    given = [
        {"question": prompt, "answers": [{"text": text}], "graded": {"score": score}, "truth": "2", "level": "easy"}
        for prompt, text, score in rows
    ]
    fields = {"prompt": "question", "completion": "answers.0.text", "reward": "graded.score", "answer": "truth"}
    file = jsonl(given)
    report = import_files([file], tmp_path / "store", tokenizer=tokenizer, fields=fields)
    assert (report.num_imported, report.num_groups, report.num_without_log_probs) == (4, 3, 4)
    assert (report.num_without_reward, report.num_unended, report.num_groups_with_spread) == (1, 4, 1)
    rows = rows_of(tmp_path / "store")
    assert rows["input_ids"][0].tolist() == [*map(ord, "1+1=2")]
    assert rows["assistant_mask"][0].tolist() == [False] * 4 + [True]
    assert np.isnan(rows["log_probs"][0]).all()
    assert rows["num_prompt_tokens"].tolist() == [4] * 4
    assert rows["group_id"].tolist() == [0, 0, 1, 2]
    assert rows["trajectory_id"].tolist() == [0, 1, 2, 3]
    assert same(rows["task_reward"], [1.0, 0.25, 1.0, NAN])
    assert rows["completion"][1] == "33"
    assert rows["finish_reason"] == [""] * 4
    assert json.loads(rows["meta"][0]) == {
        "answer": "2",
        "prompt": {"level": "easy"},
        "source": {"file": str(file), "row": 1, "format": "rows"},
        "encoded": {"tokenizer": "given", "prompt": "text", "completion": "text"},
    }


def test_lists_of_completions_are_one_group_each(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A row with several completions is one group, also where the next row has the same prompt."""
    row = {"prompt": "a", "completion": ["x", "yz"], "reward": [1.0, 0.0], "finish_reason": ["stop", "length"]}
    import_files([jsonl([row, row])], tmp_path / "store", tokenizer=tokenizer)
    rows = rows_of(tmp_path / "store")
    assert rows["group_id"].tolist() == [0, 0, 1, 1]
    assert rows["input_ids"][1].tolist() == [ord("a"), ord("y"), ord("z")]
    assert rows["finish_reason"] == ["stop", "length"] * 2
    with pytest.raises(
        DataError, match=r":1: field 'reward' has length 1; it must have one item per completion, 2 in total"
    ):
        import_files([jsonl([row | {"reward": [1.0]}], "b.jsonl")], tmp_path / "b", tokenizer=tokenizer)


def test_given_token_ids_are_kept(tmp_path: Path, jsonl: Write):
    """No tokenizer is needed where ids are given, and nothing is said to be encoded."""
    row = {
        "prompt": "ab",
        "completion": "c",
        "prompt_ids": [7, 8],
        "completion_ids": [9, 10, 11],
        "log_probs": [-0.5, None, -0.25],
        "completion_mask": [1, 0, 1],
        "reward": 0.5,
        "policy_version": 3,
        "group": "q1",
        "advantage": -1.5,
    }
    import_files([jsonl([row, row, row | {"policy_version": 4}])], tmp_path / "store")
    rows = rows_of(tmp_path / "store")
    assert rows["input_ids"][0].tolist() == [7, 8, 9, 10, 11]
    assert rows["assistant_mask"][0].tolist() == [False, False, True, False, True]
    assert same(rows["log_probs"][0], [NAN, NAN, -0.5, NAN, -0.25])
    assert rows["policy_version"].tolist() == [3, 3, 4]
    assert rows["group_id"].tolist() == [0, 0, 1]  # one name under two policies: two instances
    assert rows["advantage"].tolist() == [-1.5] * 3
    assert "encoded" not in json.loads(rows["meta"][0])


def test_groups_of_one_are_refused(tmp_path: Path, jsonl: Write):
    """A file whose trajectories are each a group of one teaches nothing; each of what the error names works."""
    rows = [{"prompt_ids": [i % 2], "completion_ids": [i], "reward": i / 4, "of": {"prompt": i % 2}} for i in range(4)]
    file = jsonl(rows)
    with pytest.raises(
        DefinitionError,
        match=r":3: a prompt reappears after other prompts.* \(fields of the rows: of\)\..*--group FIELD",
    ):
        import_files([file], tmp_path / "store")
    assert not (tmp_path / "store").exists()
    for group, wanted in (("of.prompt", [0, 1, 0, 1]), (2, [0, 0, 1, 1]), ("2", [0, 0, 1, 1]), ("none", [0, 1, 2, 3])):
        store = tmp_path / f"{group!r}"
        report = import_files([file], store, group=group)
        assert rows_of(store)["group_id"].tolist() == wanted
        assert report.num_groups_with_spread == (0 if group == "none" else 2)


def test_bad_rows_are_passed_over_up_to_a_number(tmp_path: Path, jsonl: Write):
    """Rows that cannot be read, and lines that are no JSON, are named and passed over; one more is an error."""
    good = {"prompt_ids": [1], "completion_ids": [2], "reward": 1.0}
    file = jsonl([good, good | {"reward": "high"}, good, good | {"completion_ids": "x"}, good])
    with file.open("a") as lines:
        lines.write("{\n[1]\n")
    report = import_files([file], tmp_path / "store", skip_bad=4)
    assert report.num_imported == 3
    assert [bad.split(": ")[0] for bad in report.files[0].bad] == [f"{file}:{line}" for line in (2, 4, 6, 7)]
    with pytest.raises(DataError, match=r":6: this line is not JSON"):
        import_files([file], tmp_path / "other", skip_bad=2)
    assert len(rows_of(tmp_path / "other")["trajectory_id"]) == 3
    again = import_files([file], tmp_path / "store", skip_bad=4)
    assert (again.num_imported, again.num_skipped) == (0, 3)


def test_a_template_that_refuses_is_one_sentence(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """The row is named and may be skipped; content in parts of text goes through as text."""
    strict = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    chat_tokenizer = deepcopy(chat_tokenizer)
    chat_tokenizer.chat_template = strict + "U:{{ m['content'] }}{% endfor %}A:"
    plain = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "completion": "yo", "reward": 1}
    other = plain | {"prompt": [{"role": "system", "content": "x"}, *plain["prompt"]]}
    file = jsonl([plain, plain, other])
    with pytest.raises(
        DataError, match=r":3: the chat template rejects a prompt with the message roles \['system', 'user'\]"
    ):
        import_files([file], tmp_path / "store", tokenizer=chat_tokenizer)
    report = import_files([file], tmp_path / "store", tokenizer=chat_tokenizer, skip_bad=1)
    assert (report.num_skipped, len(report.files[0].bad)) == (2, 1)
    assert rows_of(tmp_path / "store")["input_ids"][0].tolist() == [*map(ord, "U:hiA:yo")]


def test_chat_template(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """A text prompt and one user message give the same ids through the template; messages stay in `meta`."""
    messages = [{"role": "user", "content": "hi"}]
    answer = [{"role": "assistant", "content": "yo"}]
    file = jsonl(
        [
            {"prompt": "hi", "completion": "yo", "reward": 1},
            {"prompt": messages, "completion": answer, "reward": 1},
        ]
    )
    import_files([file], tmp_path / "store", tokenizer=chat_tokenizer, group="none")
    import_files([file], tmp_path / "plain", tokenizer=chat_tokenizer, chat_template=False, group="none")
    rows, plain = rows_of(tmp_path / "store"), rows_of(tmp_path / "plain")
    wanted = [*map(ord, "U:hiA:yo")]
    assert rows["input_ids"][0].tolist() == rows["input_ids"][1].tolist() == wanted
    assert rows["prompt"] == ["hi", "hi"]
    assert json.loads(rows["meta"][0])["encoded"]["prompt"] == "chat template"
    assert json.loads(rows["meta"][1])["messages"] == messages
    assert plain["input_ids"][0].tolist() == [*map(ord, "hiyo")]


def trl_table(folder: Path, step: int, generation: int) -> None:
    """Write a table as `GRPOTrainer.log` of TRL 1.16 does, of two groups of two chats."""
    pandas = pytest.importorskip("pandas", reason="TRL writes its tables with pandas")
    table = {
        "step": [step] * 4,
        "prompt": [[{"role": "user", "content": f"{generation}+{i // 2}="}] for i in range(4)],
        "completion": [[{"role": "assistant", "content": str(i)}] for i in range(4)],
        "accuracy": [1.0, 0.0, math.nan, generation / 8],
        "tag": ["a", None, None, "b"],
        "advantage": [0.5, -0.5, math.nan, 0.0],
    }
    folder.mkdir(exist_ok=True)
    pandas.DataFrame(table).to_parquet(folder / f"completions_{step:05d}.parquet")


def test_trl_tables_of_one_generation(tmp_path: Path, chat_tokenizer: Any):
    """A table that repeats the one before it is counted and left out, also by later imports of a folder that grew."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    folder, store = tmp_path / "completions", tmp_path / "store"
    for step in (1, 2, 3):
        trl_table(folder, step, generation=0)
    first = import_files([folder], store, tokenizer=chat_tokenizer)
    assert [(file.num_imported, file.num_left_out) for file in first.files] == [(4, 0), (0, 4), (0, 4)]
    assert first.files[2].about == "repeats the rows of completions_00002.parquet, skipped"
    assert rows_of(store)["policy_version"].tolist() == [0] * 4
    for step in (4, 5, 6):
        trl_table(folder, step, generation=step // 6)  # step 6 learns from another generation
    grown = import_files([folder], store, tokenizer=chat_tokenizer)
    counts = [(file.num_imported, file.num_skipped, file.num_left_out) for file in grown.files]
    assert counts == [(0, 4, 0), *[(0, 0, 4)] * 4, (4, 0, 0)]
    import_files([folder], tmp_path / "at_once", tokenizer=chat_tokenizer)
    rows, wanted = rows_of(store), rows_of(tmp_path / "at_once")
    assert rows["policy_version"].tolist() == wanted["policy_version"].tolist() == [0] * 4 + [5] * 4
    assert rows["trajectory_id"].tolist() == wanted["trajectory_id"].tolist()


def test_trl_tables_that_only_resemble(tmp_path: Path, chat_tokenizer: Any):
    """A generation that comes back later, one that grows, and equal tables of two steps are imported, each row once."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import concat_tables, parquet

    folder, other = tmp_path / "one", tmp_path / "two"
    for step, generation in ((1, 0), (2, 1), (3, 0)):
        trl_table(folder, step, generation)
    trl_table(other, 4, generation=0)
    longer = concat_tables([parquet.read_table(other / "completions_00004.parquet")] * 2)
    parquet.write_table(longer, other / "completions_00005.parquet")
    report = import_files([folder, other], tmp_path / "store", tokenizer=chat_tokenizer)
    assert [(file.num_imported, file.num_left_out, file.num_skipped) for file in report.files] == [
        *[(4, 0, 0)] * 4,
        (4, 0, 4),  # the rows of step 4 again, and as many new ones
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"completion": [{"role": "assistant", "content": "2"}, {"role": "tool", "content": "3"}]},
        {"completion": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}]},
        {"completion": [{"role": "assistant", "content": "2", "reasoning_content": "one and one"}]},
        {"completion": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "one"}]}]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image"}]}]},
        {"prompt": [{"role": "user", "content": {"text": "1+1"}}]},
    ],
)
def test_messages_that_are_more_than_text(tmp_path: Path, jsonl: Write, tokenizer: Any, change: dict[str, Any]):
    """What encoded text would lose of a message is refused; with token ids the text is for people only."""
    row = {"prompt": "1+1=", "completion": "2", "reward": 1} | change
    with pytest.raises(
        DataError, match=r":1: field '(prompt|completion)' (has|contains) .* no token ids.* Export the token"
    ):
        import_files([jsonl([row])], tmp_path / "store", tokenizer=tokenizer)
    ids = {"prompt_ids": [7], "completion_ids": [8]}
    assert import_files([jsonl([row | ids])], tmp_path / "store", tokenizer=tokenizer).num_imported == 1


def test_tinker_samples_and_summaries(tmp_path: Path, jsonl: Write):
    """Samples take the rewards of the rollout summaries named in the same command, whatever the order."""

    def sample(group: int, traj: int, tokens: list[int]) -> dict[str, Any]:
        return {
            "kind": "sample",
            "scope": {"run_id": "r", "split": "train", "iteration": 4, "group_idx": group, "traj_idx": traj},
            "created_at": 12.5,
            "num_samples": 1,
            "status": "ok",
            "prompt_tokens": [1, 2],
            "samples": [{"tokens": tokens, "logprobs": [-0.5] * len(tokens), "stop_reason": "stop"}],
        }

    def summary(group: int, traj: int, reward: float) -> dict[str, Any]:
        where = {"split": "train", "iteration": 4, "group_idx": group, "traj_idx": traj}
        return where | {"schema_version": 1, "total_reward": reward, "steps": []}

    failed = {"kind": "sample", "status": "error", "scope": {}}
    samples = jsonl([sample(0, 0, [3]), sample(1, 0, [4]), sample(0, 1, [5, 6]), failed], "capture/sample.jsonl")
    rewards = jsonl([summary(0, 0, 1.0), summary(0, 1, 0.25)], "train_rollout_summaries.jsonl")
    report = import_files([samples, rewards], tmp_path / "store")
    assert (report.num_imported, report.num_without_reward, report.files[0].num_left_out) == (3, 1, 1)
    rows = rows_of(tmp_path / "store")
    assert same(rows["task_reward"], [1.0, NAN, 0.25])
    assert rows["group_id"].tolist() == [0, 1, 0]
    assert same(rows["log_probs"][2], [NAN, NAN, -0.5, -0.5])
    assert rows["policy_version"].tolist() == [4, 4, 4]
    assert rows["created_at"].tolist() == [12.5] * 3
    with pytest.raises(DefinitionError, match=r"rewards but no tokens.*sample\.jsonl"):
        import_files([rewards], tmp_path / "none")


def test_a_field_that_begins_later(tmp_path: Path, jsonl: Write):
    """A field that the first row does not have counts from the row on that has it: here a mask of tool output."""
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "reward": 1.0}
    more = {"completion_mask": [1, 0], "log_probs": [-0.5, -1.0], "advantage": 0.5, "policy_version": 3}
    import_files([jsonl([row, row | more])], tmp_path / "store", group="none")
    rows = rows_of(tmp_path / "store")
    assert [mask.tolist() for mask in rows["assistant_mask"]] == [[False, True, True], [False, True, False]]
    assert same(rows["log_probs"][1], [NAN, -0.5, NAN])
    assert same(rows["advantage"], [NAN, 0.5])
    assert rows["policy_version"].tolist() == [-1, 3]  # nobody named the first


def test_advantages_of_tokens(tmp_path: Path, jsonl: Write):
    """One advantage that every token of the policy has is the trajectory's; of several none is taken."""
    row = {"prompt_ids": [1], "completion_ids": [2, 3, 4], "completion_mask": [1, 0, 1], "reward": 1.0}
    row["advantage"] = [0.5, 0.0, 0.5]
    import_files([jsonl([row])], tmp_path / "a")
    assert rows_of(tmp_path / "a")["advantage"].tolist() == [0.5]
    broken = row | {"advantage": [0.5, 0.0, 0.75]}
    with pytest.raises(DataError, match=r":2: field 'advantage' differs between tokens .*--field advantage=none"):
        import_files([jsonl([row, broken], "b.jsonl")], tmp_path / "b")
    import_files([jsonl([row, broken])], tmp_path / "c", fields={"advantage": "none"})
    assert np.isnan(rows_of(tmp_path / "c")["advantage"]).all()


def test_values_of_tokens_beside_text(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Log-probs of sampled tokens are not those of what a tokenizer makes of the text, though they be as many."""
    file = jsonl([{"prompt": "a", "completion": "b", "reward": 1, "log_probs": [-1.0, -2.0]}])
    with pytest.raises(DataError, match=r":1: the row has values per token \(log_probs\).*--field log_probs=none"):
        import_files([file], tmp_path / "store", tokenizer=tokenizer)
    import_files([file], tmp_path / "store", tokenizer=tokenizer, fields={"log_probs": "none"})
    assert np.isnan(rows_of(tmp_path / "store")["log_probs"][0]).all()


@pytest.mark.parametrize(
    ("written", "wanted"),
    [(12.5, 12.5), ("1970-01-01T00:00:12.5", 12.5), ("1970-01-02", 86400.0), ("1970-01-01T01:00:00+01:00", 0.0)],
)
def test_times(tmp_path: Path, jsonl: Write, written: float | str, wanted: float):
    """A time is seconds or a date; what is neither is named."""
    row = {"prompt_ids": [1], "completion_ids": [2], "reward": 1.0, "created_at": written}
    with pytest.raises(
        DataError, match=r":2: field 'created_at' must be a number of seconds or a date .*got str 'noon'"
    ):
        import_files([jsonl([row, row | {"created_at": "noon"}])], tmp_path / "store")
    assert rows_of(tmp_path / "store")["created_at"].tolist() == [wanted]


@pytest.mark.slow
def test_gsm8k_solutions(tmp_path: Path, gsm8k_dir: Path, tokenizer: Any):
    """The real file: 1,319 questions of four graded solutions, rewards as OpenAI graded them."""
    file = gsm8k_dir / "example_model_solutions.jsonl"
    report = import_files([file], tmp_path / "store", tokenizer=tokenizer)
    assert (report.files[0].format, report.num_imported, report.num_groups) == ("gsm8k-solutions", 5276, 1319)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    graded = [value for line in lines for value in line.values() if isinstance(value, dict)]
    with TrajectoryStore.open(tmp_path / "store") as store:
        ids = store.ids()
        assert store.read_scalars("task_reward").tolist() == [float(item["is_correct"]) for item in graded]
        assert np.array_equal(store.read_scalars("group_id"), np.repeat(np.arange(1319), 4))
        assert store.read(ids, ["completion"])["completion"] == [item["solution"] for item in graded]
        meta = json.loads(store.read(ids[-1:], ["meta"])["meta"][0])
    assert meta["answer"] == lines[-1]["ground_truth"]
    assert meta["prompt"] == {"model": "175b_verification"}


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"prompt": "a", "reward": 1},
            r"no field for completion\..*Fields of the row: prompt, reward\..*--field completion=",
        ),
        ({"prompt": "a", "completion": "b"}, r"no field for reward"),
        ({"step": 1, "prompt": "a", "completion": "b", "advantage": 0.5}, r"there is no reward column"),
    ],
)
def test_missing_fields_are_named(tmp_path: Path, jsonl: Write, row: dict[str, Any], wanted: str):
    """The message says what was looked for, what is there, and the option to type."""
    with pytest.raises(DefinitionError, match=wanted):
        import_files([jsonl([row])], tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"completion": 3}, r"rollouts.jsonl:2: field 'completion' must be text or chat messages, got int 3"),
        ({"reward": "good"}, r":2: field 'reward' must be a number, got str 'good'"),
        ({"completion_ids": [1, -2]}, r":2: field 'completion_ids' must be a list of token ids"),
        ({"log_probs": [-1.0]}, r":2: log_probs must contain one value per completion token: expected 2, got 1"),
        ({"prompt_ids": [2**31]}, r":2: field 'prompt_ids' must be"),
        ({"reward": math.inf}, r":2: field 'reward' must be finite .*got float inf"),
        ({"reward": 1e39}, r":2: field 'reward' must be finite and at most 3.403e\+38"),
        ({"reward": 10**400}, r":2: field 'reward' must be a number within the range of a float, got int 1000"),
        ({"advantage": -math.inf}, r":2: field 'advantage' must be finite"),
        (
            {"completion_mask": ["0", "1"]},
            r":2: field 'completion_mask' must contain only 0 and 1, .*got str '0' at position 0",
        ),
        (
            {"log_probs": [-0.5, 5.0]},
            r":2: field 'log_probs' must contain log-probs.*at most 0, got float 5.0 at position 1",
        ),
        ({"log_probs": [-math.inf, 0]}, r":2: field 'log_probs' must contain log-probs.*got float -inf at position 0"),
        (
            {"policy_version": 2**63},
            r":2: field 'policy_version' must be a whole number of at most 9223372036854775807",
        ),
        ({"completion": "\ud800"}, r":2: field 'completion' contains half of a surrogate pair \(\\ud800\)"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, r":2: field 'prompt' contains half of a surrogate pair"),
        ({"note": ["\ud800"]}, r":2: field 'note' contains half of a surrogate pair"),
        ({"answer": "\ud800"}, r":2: field 'answer' contains half of a surrogate pair"),
        ({"finish_reason": ["stop"]}, r":2: field 'finish_reason' must be text, got list \['stop'\]"),
        (
            {"created_at": 1_700_000_000_000},
            r":2: field 'created_at' must be seconds since 1970, got int 1700000000000",
        ),
        ({"prompt": [{"role": "user", "content": "a"}, "b"]}, r":2: field 'prompt' must be text or chat messages"),
        ({"prompt_ids": [], "completion_ids": [], "log_probs": None}, r":2: neither the prompt nor the completion"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(tmp_path: Path, jsonl: Write, change: dict[str, Any], wanted: str):
    """What is wrong with a row is said with file and line, and rows before it are in the store."""
    row = {
        "prompt": "a",
        "completion": "b",
        "reward": 1,
        "prompt_ids": [1],
        "completion_ids": [1, 2],
        "log_probs": [0, 0],
    }
    row |= {"advantage": 0.5, "policy_version": 1, "note": "", "answer": "1"}
    with pytest.raises(DataError, match=wanted):
        import_files([jsonl([row, row | change])], tmp_path / "store", group="none")
    assert rows_of(tmp_path / "store")["trajectory_id"].tolist() == [0]


def test_a_named_format_must_fit():
    """A format that does not fit says what is lacking and what the file looks like."""
    with pytest.raises(
        DefinitionError,
        match=r"lack required fields \(advantage, completion, prompt.*Its format appears to be verl: use --format verl",
    ):
        find_tool("trl", {"input": "a", "output": "b", "gts": "", "score": 1, "step": 0})
    with pytest.raises(DefinitionError, match=r"Did you mean 'tinker'"):
        find_tool("tinkr", {})


def test_a_line_that_is_nested_too_deeply(tmp_path: Path, jsonl: Write):
    """A line that nothing can keep is named with its place, and rows before it are in the store."""
    good = {"prompt_ids": [1], "completion_ids": [2], "reward": 1.0}
    for depth in (900, 100_000):
        file = jsonl([good], f"{depth}.jsonl")
        with file.open("a") as lines:
            lines.write(
                '{"prompt_ids": [1], "completion_ids": [2], "reward": 1, "x": ' + "[" * depth + "]" * depth + "}\n"
            )
        if depth == 900:
            assert import_files([file], tmp_path / str(depth)).num_imported == 2
            continue
        with pytest.raises(DataError, match=rf"{depth}\.jsonl:2: .*nested too deeply"):
            import_files([file], tmp_path / str(depth))
        assert len(rows_of(tmp_path / str(depth))["trajectory_id"]) == 1


@pytest.mark.parametrize("written", ["[]", "{", '{"columns": 3}', '[{"name": 1}]'])
def test_a_list_of_columns_that_is_none(tmp_path: Path, jsonl: Write, written: str):
    """An export whose list of columns was damaged is refused with the file's name."""
    file = jsonl([{"input_ids": [1], "trajectory_id": 0}])
    file.with_name(f"{file.name}.schema.json").write_text(written)
    with pytest.raises(DataError, match=r"rollouts\.jsonl: the list of its columns.*cannot be read"):
        import_files([file], tmp_path / "store")


def test_text_that_ends_with_its_eos_token(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A completion that was written down with its special tokens does not get a second EOS token."""
    row = {"prompt": "a", "completion": "b<eos>", "reward": 1}
    import_files([jsonl([row])], tmp_path / "store", tokenizer=tokenizer)
    assert rows_of(tmp_path / "store")["input_ids"][0].tolist() == [ord("a"), ord("b"), 1]
