"""Each format is recognised by its field names and read as its tool writes it."""

from __future__ import annotations

import json
import math
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import import_files
from rlhf_pipeline.exchange.formats import find_format
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


def without_template(tokenizer: Any) -> Any:
    """Return a tokenizer that has no chat template."""
    other = copy(tokenizer)
    other.chat_template = None
    return other


def test_prompts_and_completions_of_any_file(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Text is encoded once, ends with EOS, and `meta` says so; rows in turn with one prompt are a group."""
    file = jsonl(
        [
            {"question": "1+1=", "response": "2", "score": 1, "ground_truth": "2", "level": "easy"},
            {"question": "1+1=", "response": "33", "score": 0.25, "ground_truth": "2", "level": "easy"},
            {"question": "2+2=", "response": "4", "score": True, "ground_truth": "4", "level": "easy"},
            {"question": "1+1=", "response": "2", "score": None, "ground_truth": "2", "level": "easy"},
        ]
    )
    report = import_files([file], tmp_path / "store", tokenizer=tokenizer)
    assert (report.num_imported, report.num_groups, report.num_without_log_probs) == (4, 3, 4)
    assert report.num_without_reward == 1
    rows = rows_of(tmp_path / "store")
    assert rows["input_ids"][0].tolist() == [*map(ord, "1+1=2"), 1]
    assert rows["assistant_mask"][0].tolist() == [False] * 4 + [True] * 2
    assert np.isnan(rows["log_probs"][0]).all()
    assert rows["num_prompt_tokens"].tolist() == [4] * 4
    assert rows["group_id"].tolist() == [0, 0, 1, 2]
    assert rows["trajectory_id"].tolist() == [0, 1, 2, 3]
    assert same(rows["task_reward"], [1.0, 0.25, 1.0, NAN])
    assert rows["completion"][1] == "33"
    assert rows["finish_reason"] == ["stop"] * 4
    assert json.loads(rows["meta"][0]) == {
        "answer": "2",
        "prompt": {"level": "easy"},
        "source": {"file": str(file), "row": 1, "format": "groups"},
        "encoded": {"tokenizer": "given", "prompt": "text", "completion": "text + eos"},
    }


def test_lists_of_completions_are_one_group_each(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A row with several completions is one group, also where the next row has the same prompt."""
    row = {"prompt": "a", "completions": ["x", "yz"], "rewards": [1.0, 0.0], "finish_reasons": ["stop", "length"]}
    import_files([jsonl([row, row])], tmp_path / "store", tokenizer=tokenizer)
    rows = rows_of(tmp_path / "store")
    assert rows["group_id"].tolist() == [0, 0, 1, 1]
    assert rows["input_ids"][1].tolist() == [ord("a"), ord("y"), ord("z")]  # cut off: no EOS
    assert rows["finish_reason"] == ["stop", "length"] * 2


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
        "group_id": "q1",
        "advantage": -1.5,
    }
    import_files([jsonl([row, row | {"policy_version": 4}])], tmp_path / "store")
    rows = rows_of(tmp_path / "store")
    assert rows["input_ids"][0].tolist() == [7, 8, 9, 10, 11]
    assert rows["assistant_mask"][0].tolist() == [False, False, True, False, True]
    assert same(rows["log_probs"][0], [NAN, NAN, -0.5, NAN, -0.25])
    assert rows["policy_version"].tolist() == [3, 4]
    assert rows["group_id"].tolist() == [0, 1]  # one name under two policies: two instances
    assert rows["advantage"].tolist() == [-1.5, -1.5]
    assert "encoded" not in json.loads(rows["meta"][0])


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
    import_files([file], tmp_path / "store", tokenizer=chat_tokenizer)
    import_files([file], tmp_path / "plain", tokenizer=chat_tokenizer, chat_template=False, eos=False)
    rows, plain = rows_of(tmp_path / "store"), rows_of(tmp_path / "plain")
    wanted = [*map(ord, "U:hiA:yo"), 1]
    assert rows["input_ids"][0].tolist() == rows["input_ids"][1].tolist() == wanted
    assert rows["prompt"] == ["hi", "hi"]
    assert json.loads(rows["meta"][0])["encoded"]["prompt"] == "chat template"
    assert json.loads(rows["meta"][1])["messages"] == messages
    assert plain["input_ids"][0].tolist() == [*map(ord, "hiyo")]


def test_trl_table(tmp_path: Path, tokenizer: Any):
    """TRL's completions table: named rewards are summed, NaN does not count, the step is the version."""
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import parquet

    folder = tmp_path / "completions"
    folder.mkdir()
    for step in (2, 10):
        table = {
            "step": [step] * 4,
            "prompt": ["1+1=", "1+1=", "2+2=", "2+2="],
            "completion": ["2", "3", "4", str(step)],
            "accuracy": [1.0, 0.0, 1.0, None],
            "format": [0.5, None, 0.0, None],
            "advantage": [0.7071, -0.7071, 0.0, 0.0],
        }
        parquet.write_table(pyarrow.table(table), folder / f"completions_{step}.parquet")
    fields = {"reward": "accuracy+format"}
    report = import_files([folder], tmp_path / "store", tokenizer=tokenizer, fields=fields)
    assert [file.path.name for file in report.files] == ["completions_2.parquet", "completions_10.parquet"]
    assert {file.format for file in report.files} == {"trl"}
    assert "reward=accuracy+format" in report.files[0].about
    rows = rows_of(tmp_path / "store")
    assert same(rows["task_reward"][:4], [1.5, 0.0, 1.0, NAN])
    assert rows["policy_version"].tolist() == [1] * 4 + [9] * 4  # TRL writes the table after the step
    assert same(rows["advantage"][:4], [0.7071, -0.7071, 0.0, 0.0])
    second = 1 << 40  # the ids of the second file
    assert rows["group_id"].tolist() == [0, 0, 1, 1, second, second, second + 1, second + 1]
    chosen = import_files([folder], tmp_path / "one", tokenizer=tokenizer, fields={"reward": "accuracy"})
    assert chosen.reward_sum == 4.0


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


def test_trl_tables_of_one_generation(tmp_path: Path, tokenizer: Any):
    """A table that repeats the one before it is counted and left out, also by later imports of a folder that grew."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    folder, store = tmp_path / "completions", tmp_path / "store"
    for step in (1, 2, 3):
        trl_table(folder, step, generation=0)
    first = import_files([folder], store, tokenizer=tokenizer)
    assert [(file.num_imported, file.num_left_out) for file in first.files] == [(4, 0), (0, 4), (0, 4)]
    assert first.files[2].about == "the rows of completions_00002.parquet again, left out"
    assert rows_of(store)["policy_version"].tolist() == [0] * 4
    for step in (4, 5, 6):
        trl_table(folder, step, generation=step // 6)  # step 6 learns from another generation
    grown = import_files([folder], store, tokenizer=tokenizer)
    counts = [(file.num_imported, file.num_skipped, file.num_left_out) for file in grown.files]
    assert counts == [(0, 4, 0), *[(0, 0, 4)] * 4, (4, 0, 0)]
    import_files([folder], tmp_path / "at_once", tokenizer=tokenizer)
    rows, wanted = rows_of(store), rows_of(tmp_path / "at_once")
    assert rows["policy_version"].tolist() == wanted["policy_version"].tolist() == [0] * 4 + [5] * 4
    assert rows["trajectory_id"].tolist() == wanted["trajectory_id"].tolist()


def test_trl_tables_that_only_resemble(tmp_path: Path, tokenizer: Any):
    """A generation that comes back later, one that goes on, and equal tables of two runs are all imported."""
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    from pyarrow import concat_tables, parquet

    folder, other = tmp_path / "one", tmp_path / "two"
    for step, generation in ((1, 0), (2, 1), (3, 0)):
        trl_table(folder, step, generation)
    trl_table(other, 4, generation=0)
    longer = concat_tables([parquet.read_table(other / "completions_00004.parquet")] * 2)
    parquet.write_table(longer, other / "completions_00005.parquet")
    report = import_files([folder, other], tmp_path / "store", tokenizer=tokenizer)
    assert [(file.num_imported, file.num_left_out) for file in report.files] == [(4, 0)] * 4 + [(8, 0)]


@dataclass(kw_only=True)
class Dump:
    """Rows as a tool writes them, and what the store must hold of them."""

    name: str
    rows: list[dict[str, Any]]
    file: str = "rollouts.jsonl"
    left_out: int = 0
    columns: dict[str, list[Any]]
    """Whole columns: scalars, or a list per trajectory."""
    meta: dict[str, Any] = field(default_factory=dict)
    """What the first trajectory's `meta` holds of the row."""


def dumps() -> list[Dump]:
    """One dump of each format whose reader is a row of the table of formats."""
    verl = {"input": "user\n1+1\nassistant\n", "output": "2", "gts": "2", "score": 1.0, "step": 5, "acc": True}
    shard = {
        **{"step": 3, "sample_idx": 0, "prompt_idx": 0, "prompt_tokens": [5, 6], "response_tokens": [7, 1]},
        **{"reward": 10.0, "advantage": 0.7, "finish_reason": "stop", "dataset": "math", "ground_truth": [9, 9]},
        **{"request_info": None, "logprobs": [-0.1, -0.2]},
    }
    export = {
        **{"schema_version": 1, "step": 2, "rank": 0, "env_name": "sums", "token_ids": [1, 2, 3]},
        **{"loss_mask": [False, True, True], "advantages": [0.0, 0.5, 0.5], "inference_logprobs": [0.0, -1.0, -2.0]},
    }
    graded = {"question": "1+1=", "ground_truth": "A: 2", "a": {"is_correct": False, "solution": "3"}}
    graded["b"] = {"is_correct": True, "solution": "2"}
    evaluation = {"input_prompt": "1+1=", "output_response": "2", "score": [0.0, 1.0], "stop_reason": "stop"}
    evaluation |= {"env_class": "gsm8k", "env_extras": {}, "data_source": "gsm8k"}
    batch = {
        "prompt_token_ids": [[1, 2], [1, 2], [1, 2]],
        "response_ids": [[3, 4], [5], [6]],
        "rewards": [[0.0, 1.0], [0.5], [0.0]],
        "loss_masks": [[1, 0], [1], [1]],
        "rollout_logprobs": [[-0.5, -1.0], [-0.25], [-2.0]],
        "stop_reasons": ["stop", "length", "stop"],
        "trajectory_ids": [{"instance_id": name, "repetition_id": 0} for name in ("a", "a", "b")],
    }
    padded = {
        **{"content": ["1+1=", "2"], "rewards": 1.0, "input_lengths": 5, "token_ids": [1, 2, 3, 4, 5, 0, 0]},
        **{"token_loss_mask": [0, 0, 1, 0, 1, 0, 0], "sample_loss_mask": 1.0, "prev_logprobs": [0.0] * 7, "idx": 0},
        "advantages": [0.0, 0.0, 0.7, 0.7, 0.7, 0.0, 0.0],
        "generation_logprobs": [0.0, 0.0, -0.5, 0.0, -0.25, 0.0, 0.0],
    }
    return [
        Dump(  # rows come in any order, so a group is a step's prompt; the chat template is in the prompt already
            name="verl",
            rows=[verl, verl | {"input": "other"}, verl | {"output": "3", "score": 0.0}],
            file="5.jsonl",
            columns={
                "group_id": [0, 1, 0],
                "policy_version": [4, 4, 4],
                "input_ids": [
                    [*map(ord, text), 1] for text in ("user\n1+1\nassistant\n2", "other2", "user\n1+1\nassistant\n3")
                ],
            },
            meta={"answer": "2", "prompt": {"acc": True}},
        ),
        Dump(  # a group is a step's prompt index
            name="open-instruct",
            rows=[shard, shard | {"sample_idx": 1, "logprobs": None}, shard | {"step": 4}],
            columns={
                "group_id": [0, 0, 1],
                "log_probs": [[NAN, NAN, -0.1, -0.2], [NAN] * 4, [NAN, NAN, -0.1, -0.2]],
                "policy_version": [3, 3, 4],
                "advantage": [0.7, 0.7, 0.7],
            },
        ),
        Dump(  # no rewards and no groups; a sequence without a token to learn from is left out
            name="prime-rl",
            rows=[export, export | {"loss_mask": [False] * 3}, export],
            left_out=1,
            columns={
                "log_probs": [[NAN, -1.0, -2.0]] * 2,
                "advantage": [0.5, 0.5],
                "task_reward": [NAN, NAN],
                "group_id": [0, 1],
                "policy_version": [2, 2],
            },
        ),
        Dump(  # a line is a group: one completion per model
            name="gsm8k-solutions",
            rows=[graded, graded],
            columns={"task_reward": [0.0, 1.0] * 2, "group_id": [0, 0, 1, 1], "completion": ["3", "2"] * 2},
            meta={"answer": "A: 2", "prompt": {"model": "a"}},
        ),
        Dump(  # rewards per token are summed, and the step is in the path
            name="skyrl",
            rows=[evaluation, evaluation | {"output_response": "3", "score": 0.5}],
            file="global_step_7_evals/gsm8k.jsonl",
            columns={"task_reward": [1.0, 0.5], "policy_version": [7, 7], "group_id": [0, 0]},
        ),
        Dump(  # token ids and masks as they are, groups by instance
            name="skyrl",
            rows=[batch],
            columns={
                "task_reward": [1.0, 0.5, 0.0],
                "group_id": [0, 0, 1],
                "assistant_mask": [[False, False, True, False], [False, False, True], [False, False, True]],
                "log_probs": [[NAN, NAN, -0.5, NAN], [NAN, NAN, -0.25], [NAN, NAN, -2.0]],
                "finish_reason": ["stop", "length", "stop"],
            },
            meta={"prompt": {}},
        ),
        Dump(  # ids are cut to their length, tool output is masked, the version is the step before the file's
            name="nemo-rl",
            rows=[padded, padded | {"rewards": 0.0}, padded | {"sample_loss_mask": 0.0}],
            file="train_data_step4.jsonl",
            left_out=1,
            columns={
                "input_ids": [[1, 2, 3, 4, 5]] * 2,
                "log_probs": [[NAN, NAN, -0.5, NAN, -0.25]] * 2,
                "policy_version": [3, 3],
                "advantage": [0.7, 0.7],
                "prompt": ["1+1="] * 2,
                "completion": ["2", "2"],
                "task_reward": [1.0, 0.0],
            },
            meta={"prompt": {"idx": 0}},
        ),
    ]


@pytest.mark.parametrize("dump", dumps(), ids=lambda dump: f"{dump.name}-{dump.file}")
def test_dumps_of_other_tools(tmp_path: Path, jsonl: Write, chat_tokenizer: Any, dump: Dump):
    """Each format is recognised, and each of its fields comes where it belongs."""
    file = jsonl(dump.rows, dump.file)
    tokenizer = chat_tokenizer if dump.name == "verl" else without_template(chat_tokenizer)
    report = import_files([file], tmp_path / "store", tokenizer=tokenizer)
    assert (report.files[0].format, report.files[0].num_left_out) == (dump.name, dump.left_out)
    rows = rows_of(tmp_path / "store")
    for name, wanted in dump.columns.items():
        found = list(rows[name])
        assert len(found) == len(wanted), name
        for i, value in enumerate(wanted):
            assert np.array_equal(found[i], value) or same(found[i], value), (name, i)
    meta = json.loads(rows["meta"][0])
    assert {name: meta[name] for name in dump.meta} == dump.meta


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
        DataError, match=r":1: field '(prompt|completion)' holds .* and no token ids.* Export the token"
    ):
        import_files([jsonl([row])], tmp_path / "store", tokenizer=tokenizer)
    ids = {"prompt_ids": [7], "completion_ids": [8]}
    assert import_files([jsonl([row | ids])], tmp_path / "store", tokenizer=tokenizer).num_imported == 1


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"prompt_token_ids": [[1], [1]], "response_ids": [[3], [5]], "rewards": [1.0]},
            r":1: field 'rewards' has 1 items for 2 completions",
        ),
        (
            {"token_ids": [5, 6, 7], "loss_mask": [0, 1], "inference_logprobs": [0.0, -1.0, -2.0]},
            r":1: 3 token_ids, 2 loss_mask, 3 inference_logprobs",
        ),
    ],
)
def test_lists_of_other_lengths_are_named(tmp_path: Path, jsonl: Write, row: dict[str, Any], wanted: str):
    """Lists that must fit each other and do not are named with their lengths."""
    with pytest.raises(DataError, match=wanted):
        import_files([jsonl([row])], tmp_path / "store")


def episode(group: str, score: float, *, ok: bool = True) -> dict[str, Any]:
    """Return an episode as prime-rl's file monitor writes it: a user turn, an answer, a tool turn, an answer."""
    said = ["1+1?", "use a tool", "2", "it is 2"]
    ids = [[1, 2, 3], [4, 5], [6], [7, 8]]
    masks = [[False] * 3, [False, True], [False], [True, True]]
    nodes = [
        {
            "parent": i - 1 if i else None,
            "message": {"role": "user", "content": said[i]},
            "sampled": any(masks[i]),
            "token_ids": ids[i],
            "mask": masks[i],
            "logprobs": [-0.5 * i] * sum(masks[i]),
        }
        for i in range(4)
    ]
    trace = {
        "id": "t",
        "ok": ok,
        "task": {"data": {"answer": "2"}},
        "agent": {"name": "solver", "trainable": True},
        "nodes": nodes,
        "rewards": {"right": {"score": score, "weight": 2.0}, "brief": {"score": 0.5}, "late": None},
        "calls": [{"node": 1, "finish_reason": "tool_calls"}, {"node": 3, "finish_reason": "stop"}],
    }
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": 9, "policy": {"start": 8, "end": 9}}}
    return {"id": "e", "task": {}, "env": {"id": "sums"}, "group": {"id": group}, "run": run, "traces": [trace]}


def test_prime_rl_episodes(tmp_path: Path, jsonl: Write):
    """Several turns are one trajectory with a mask; failed traces are left out and counted."""
    file = jsonl([episode("g1", 1.0), episode("g2", 0.0), episode("g1", 0.0), episode("g1", 0.0, ok=False)])
    report = import_files([file], tmp_path / "store")
    assert (report.files[0].format, report.num_imported, report.files[0].num_left_out) == ("prime-rl", 3, 1)
    rows = rows_of(tmp_path / "store")
    assert rows["input_ids"][0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rows["assistant_mask"][0].tolist() == [False] * 4 + [True, False, True, True]
    assert same(rows["log_probs"][0], [NAN] * 4 + [-0.5, NAN, -1.5, -1.5])
    assert rows["num_prompt_tokens"].tolist() == [4, 4, 4]
    assert rows["task_reward"].tolist() == [2.5, 0.5, 0.5]
    assert rows["group_id"].tolist() == [0, 1, 0]
    assert rows["policy_version"].tolist() == [8, 8, 8]
    assert rows["finish_reason"] == ["stop"] * 3
    assert json.loads(rows["meta"][0])["answer"] == "2"
    for name, odd in (("rewards", [1.0]), ("agent", "solver"), ("task", "sums")):
        wrong = episode("g", 1.0)
        wrong["traces"][0][name] = odd
        with pytest.raises(DataError, match=rf"field '{name}' must hold fields by name"):  # it was an AttributeError
            import_files([jsonl([wrong])], tmp_path / "other")


def test_tinker_samples_and_summaries(tmp_path: Path, jsonl: Write):
    """Samples take the rewards of the rollout summaries named in the same command, whatever the order."""

    def sample(group: int, traj: int, tokens: list[int]) -> dict[str, Any]:
        return {
            "kind": "sample",
            "scope": {"run_id": "r", "split": "train", "iteration": 4, "group_idx": group, "traj_idx": traj},
            "created_at": 12.5,
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
    with pytest.raises(DefinitionError, match=r"rewards and no tokens.*sample\.jsonl"):
        import_files([rewards], tmp_path / "none")


def test_a_field_that_begins_later(tmp_path: Path, jsonl: Write):
    """A field that the first row does not have counts from the row on that has it: here a mask of tool output."""
    row = {"prompt_ids": [1], "completion_ids": [2, 3], "reward": 1.0}
    more = {"completion_mask": [1, 0], "log_probs": [-0.5, -1.0], "advantage": 0.5, "step": 3}
    import_files([jsonl([row, row | more])], tmp_path / "store")
    rows = rows_of(tmp_path / "store")
    assert [mask.tolist() for mask in rows["assistant_mask"]] == [[False, True, True], [False, True, False]]
    assert same(rows["log_probs"][1], [NAN, -0.5, NAN])
    assert same(rows["advantage"], [NAN, 0.5])
    assert rows["policy_version"].tolist() == [0, 3]


def test_several_prompts_in_a_row(tmp_path: Path, jsonl: Write):
    """Completions of other prompts in one row are other groups, as a baseline over both means nothing."""
    row = {"prompt_ids": [[1], [2], [1]], "completion_ids": [[3], [4], [5]], "rewards": [1.0, 0.0, 0.5]}
    import_files([jsonl([row, row])], tmp_path / "store")
    assert rows_of(tmp_path / "store")["group_id"].tolist() == [0, 1, 0, 2, 3, 2]


def test_advantages_of_tokens(tmp_path: Path, jsonl: Write):
    """One advantage that every token of the policy has is the trajectory's; of several none is taken."""
    flat = {"prompt_ids": [1], "completion_ids": [2, 3, 4], "completion_mask": [1, 0, 1], "reward": 1.0}
    flat["advantages"] = [0.5, 0.0, 0.5]
    whole = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "inference_logprobs": [0, -1, -1]}
    whole["advantages"] = [0.0, 0.25, 0.25]
    for name, row, wanted in (("flat", flat, 0.5), ("whole", whole, 0.25)):
        import_files([jsonl([row])], tmp_path / name)
        assert rows_of(tmp_path / name)["advantage"].tolist() == [wanted]
        broken = row | {"advantages": [*row["advantages"][:2], 0.75]}
        with pytest.raises(DataError, match=r":2: field 'advantages' differs between tokens .*--field advantage=none"):
            import_files([jsonl([row, broken], f"{name}.jsonl")], tmp_path / f"{name} broken")
        import_files([jsonl([row, broken])], tmp_path / f"{name} without", fields={"advantage": "none"})
        assert np.isnan(rows_of(tmp_path / f"{name} without")["advantage"]).all()


def test_values_of_tokens_beside_text(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Log-probs of sampled tokens are not those of what a tokenizer makes of the text, though they be as many."""
    file = jsonl([{"prompt": "a", "completion": "b", "reward": 1, "logprobs": [-1.0, -2.0]}])
    with pytest.raises(DataError, match=r":1: there are values per token \(log_probs\).*--field log_probs=none"):
        import_files([file], tmp_path / "store", tokenizer=tokenizer)
    import_files([file], tmp_path / "store", tokenizer=tokenizer, fields={"log_probs": "none"})
    assert np.isnan(rows_of(tmp_path / "store")["log_probs"][0]).all()


@pytest.mark.parametrize(
    ("written", "wanted"),
    [(12.5, 12.5), ("1970-01-01T00:00:12.5", 12.5), ("1970-01-02", 86400.0), ("1970-01-01T01:00:00+01:00", 0.0)],
)
def test_times(tmp_path: Path, jsonl: Write, written: float | str, wanted: float):
    """A time is seconds or a date; what is neither is named."""
    row = {"prompt_ids": [1], "completion_ids": [2], "reward": 1.0, "timestamp": written}
    with pytest.raises(DataError, match=r":2: field 'timestamp' must be seconds or a date .*got str 'noon'"):
        import_files([jsonl([row, row | {"timestamp": "noon"}])], tmp_path / "store")
    assert rows_of(tmp_path / "store")["created_at"].tolist() == [wanted]


def test_a_version_that_the_user_names(tmp_path: Path, jsonl: Write):
    """It wins over the one in the path."""
    row = {"prompt_token_ids": [[1]], "response_ids": [[3]], "rewards": [1.0], "mine": 3}
    file = jsonl([row], "global_step_7/batch.jsonl")
    import_files([file], tmp_path / "a")
    import_files([file], tmp_path / "b", fields={"policy_version": "mine"})
    assert [rows_of(tmp_path / name)["policy_version"].tolist() for name in "ab"] == [[7], [3]]


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
        ({"prompt": "a", "reward": 1}, r"no field for completion .*The rows have: prompt, reward.*--field completion="),
        ({"prompt": "a", "completion": "b"}, r"no field for reward"),
        ({"step": 1, "prompt": "a", "completion": "b", "advantage": 0.5}, r"no column of rewards"),
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
        ({"log_probs": [-1.0]}, r":2: 1 values of log_probs for 2 completion tokens"),
        ({"prompt_ids": [2**31]}, r":2: field 'prompt_ids' must be"),
        ({"reward": math.inf}, r":2: field 'reward' must be finite .*got float inf"),
        ({"reward": 1e39}, r":2: field 'reward' must be finite and at most 3.403e\+38"),
        ({"reward": 10**400}, r":2: field 'reward' must be a number of reasonable size, got int 1000"),
        ({"advantage": -math.inf}, r":2: field 'advantage' must be finite"),
        ({"completion_mask": ["0", "1"]}, r":2: field 'completion_mask' must hold 0 and 1, .*got str '0' at place 0"),
        (
            {"log_probs": [-0.5, 5.0]},
            r":2: field 'log_probs' must hold log-probs.*not above 0, got float 5.0 at place 1",
        ),
        ({"log_probs": [-math.inf, 0]}, r":2: field 'log_probs' must hold log-probs.*got float -inf at place 0"),
        (
            {"policy_version": 2**63},
            r":2: field 'policy_version' must be a whole number of at most 9223372036854775807",
        ),
        ({"completion": "\ud800"}, r":2: field 'completion' holds half of a surrogate pair \(\\ud800\)"),
        ({"prompt": [{"role": "user", "content": "\udfff"}]}, r":2: field 'prompt' holds half of a surrogate pair"),
        ({"note": ["\ud800"]}, r":2: field 'note' holds half of a surrogate pair"),
        ({"answer": "\ud800"}, r":2: field 'answer' holds half of a surrogate pair"),
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
        import_files([jsonl([row, row | change])], tmp_path / "store")
    assert rows_of(tmp_path / "store")["trajectory_id"].tolist() == [0]


def test_a_named_format_must_fit():
    """A format that does not fit says what the file looks like."""
    with pytest.raises(DefinitionError, match=r"looks like --format verl"):
        find_format("trl", {"input": "a", "output": "b", "score": 1, "step": 0})
    with pytest.raises(DefinitionError, match=r"Did you mean 'tinker'"):
        find_format("tinkr", {})


def test_fields_that_a_format_knows_itself(tmp_path: Path, jsonl: Write):
    """A `--field` that would have no effect is refused."""
    with pytest.raises(DefinitionError, match=r"--field reward=x: this format knows its fields; leave out --field\."):
        import_files([jsonl([episode("g", 1.0)])], tmp_path / "store", fields={"reward": "x"})


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


def test_openrlhf_lists_of_rewards(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A list of one reward is that reward; a list of several is not guessed at."""
    row = {"input": "1+1=", "output": "2", "reward": [0.5]}
    report = import_files([jsonl([row, row | {"reward": 1.0}])], tmp_path / "store", tokenizer=tokenizer)
    assert report.files[0].format == "openrlhf"
    assert rows_of(tmp_path / "store")["task_reward"].tolist() == [0.5, 1.0]
    with pytest.raises(DataError, match=r":1: field 'reward' must be one reward, got 2 for one completion"):
        import_files([jsonl([row | {"reward": [0.5, 1.0]}])], tmp_path / "b", tokenizer=tokenizer)


def test_verifiers_results_and_traces(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """Results group by example; a trace by itself is an episode of one; a conversation without ids is refused."""
    row = {
        "example_id": 3,
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward": 1.0,
        "answer": "2",
        "format": 1.0,
    }
    row["completion"] = [{"role": "assistant", "content": "2"}]
    file = jsonl([row, row | {"example_id": 4}, row | {"reward": 0.0}])
    assert import_files([file], tmp_path / "a", tokenizer=tokenizer).files[0].format == "verifiers"
    assert rows_of(tmp_path / "a")["group_id"].tolist() == [0, 1, 0]
    several = [*row["completion"], {"role": "tool", "content": "x"}, *row["completion"]]
    with pytest.raises(DataError, match=r":1: .*3 messages \(assistant, tool, assistant\) and no token ids"):
        import_files([jsonl([row | {"completion": several}], "talk.jsonl")], tmp_path / "b", tokenizer=tokenizer)
    trace = episode("g", 1.0)["traces"][0]
    other = trace | {"task": {"data": {"answer": "3"}}}
    report = import_files([jsonl([trace, trace, other], "traces.jsonl")], tmp_path / "c")
    assert (report.files[0].format, report.num_imported) == ("prime-rl", 3)
    assert rows_of(tmp_path / "c")["group_id"].tolist() == [0, 0, 1]


def test_text_that_ends_with_its_eos_token(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """A completion that was written down with its special tokens does not get a second EOS token."""
    row = {"prompt": "a", "completion": "b<eos>", "reward": 1}
    import_files([jsonl([row])], tmp_path / "store", tokenizer=tokenizer)
    assert rows_of(tmp_path / "store")["input_ids"][0].tolist() == [ord("a"), ord("b"), 1]
