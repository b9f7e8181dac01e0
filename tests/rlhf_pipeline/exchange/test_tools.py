"""The dumps of nine tools, written in the exact shape of each tool's writer: every row is what the writer says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange import import_files
from rlhf_pipeline.exchange.tools import TOOLS, find_tool
from trajectory_store import TrajectoryStore

from .conftest import Write

DATA = Path(__file__).parent / "data"
NAN = math.nan
Row = tuple[list[int], list[int], float, int, str]
"""Token ids, the mask as 0 and 1, the reward, the group, why it ended."""


def chars(prompt: str, completion: str, *, ended: bool = False) -> tuple[list[int], list[int]]:
    """Return the ids and the mask of text, one token per character."""
    ids = [*map(ord, prompt + completion), *([1] if ended else [])]
    return ids, [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def rows_of(store: Path) -> list[Row]:
    """Return what a store holds, in order."""
    with TrajectoryStore.open(store) as opened:
        found = opened.read(opened.ids())
    first = found["group_id"].min()
    return [
        (
            found["input_ids"][i].tolist(),
            found["assistant_mask"][i].astype(int).tolist(),
            float(found["task_reward"][i]),
            int(found["group_id"][i] - first),
            found["finish_reason"][i],
        )
        for i in range(len(found["group_id"]))
    ]


def column(store: Path, name: str) -> Any:
    """Return a column of a store."""
    with TrajectoryStore.open(store) as opened:
        return opened.read(opened.ids(), [name])[name]


CHAT = "user\n1+1\nassistant\n"
WANTED: dict[str, tuple[str, list[Row]]] = {
    # No end token, no reason of an end: verl writes neither. Groups are a step's prompts, as rows are shuffled.
    "verl/ray/5.jsonl": (
        "verl",
        [
            (*chars(CHAT, "2"), 1.0, 0, ""),
            (*chars("user\n2+2\nassistant\n", "5"), 0.0, 1, ""),
            (*chars(CHAT, "3"), 0.0, 0, ""),
            (*chars("user\n2+2\nassistant\n", "4"), 1.0, 1, ""),
        ],
    ),
    # The uid is of each sample; its first part is of the prompt, which both groups share here.
    "verl/v1/5.jsonl": (
        "verl",
        [
            (*chars(CHAT, "2"), 1.0, 0, ""),
            (*chars(CHAT, "3"), 0.0, 0, ""),
            (*chars(CHAT, "4"), 0.0, 1, ""),
            (*chars(CHAT, "2"), 1.0, 1, ""),
        ],
    ),
    # A grading that timed out or raised has score 0, which is none.
    "verl/limited/7.jsonl": (
        "verl",
        [(*chars(CHAT, "2"), 1.0, 0, ""), (*chars(CHAT, "2."), NAN, 0, ""), (*chars(CHAT, "two"), NAN, 0, "")],
    ),
    # Decoded with special tokens: the end token is in the text where it was sampled. Rewards per token are summed.
    "skyrl/global_step_20_evals": (
        "skyrl",
        [
            (*chars("1+1=", "2", ended=True), 1.0, 0, "stop"),
            (*chars("2+2=", "4"), 1.0, 1, "length"),
            (*chars("1+1=", "33"), 0.25, 0, "length"),
            (*chars("2+2=", "5", ended=True), 0.0, 1, "stop"),
        ],
    ),
    # The third sample is masked by NeMo-RL (sample_loss_mask 0): nothing of it is learned, its reward counts.
    "nemo_rl/train_data_step4.jsonl": (
        "nemo-rl",
        [
            ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], 1.0, 0, ""),
            ([1, 2, 6, 5], [0, 0, 1, 1], 0.0, 0, ""),
            ([1, 7, 6, 6, 6, 6, 6], [0] * 7, 0.0, 1, ""),
            ([1, 7, 8, 5], [0, 0, 1, 1], 0.0, 1, ""),
        ],
    ),
    # `rewards` is of the batch before it was filtered.
    "nemo_rl/filtered/train_data_step2.jsonl": (
        "nemo-rl",
        [([1, 2, 3], [0, 0, 1], 1.0, 0, ""), ([1, 2, 6], [0, 0, 1], 0.5, 0, "")],
    ),
    # A row that called a tool has its output among the tokens, without a mask.
    "open_instruct": (
        "open-instruct",
        [
            ([5, 6, 7, 1], [0, 0, 1, 1], 10.0, 0, "stop"),
            ([5, 6, 8, 9], [0, 0, 1, 1], 0.0, 0, "length"),
            ([5, 7, 7, 20, 21, 1], [0] * 6, 10.0, 1, "stop"),
            ([5, 7, 7, 22, 1], [0] * 5, NAN, 1, "stop"),
            ([5, 6, 7, 1], [0, 0, 1, 1], 10.0, 2, "stop"),
        ],
    ),
    # Best-of-N samples are not in turn.
    "openrlhf/rewards.jsonl": (
        "openrlhf",
        [
            (*chars("1+1=", "2", ended=True), 1.5, 0, ""),
            (*chars("2+2=", "4", ended=True), -0.5, 1, ""),
            (*chars("1+1=", "3"), 0.25, 0, ""),
            (*chars("2+2=", "55"), -2.0, 1, ""),
        ],
    ),
    # Reward: score times weight, summed (2 * score + 0.5). The fifth has a dangling compaction, which is no sample.
    "prime_rl/rollouts/step_9/train/all": (
        "prime-rl",
        [
            ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 1, 0, 1, 1], 2.5, 0, "stop"),
            ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 1, 0, 1, 1], 0.5, 1, "length"),
            ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 1, 0, 1, 1], 0.5, 0, "turns"),
            ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1], NAN, 1, "tool_calls"),
            ([1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 1, 0, 1, 1], 2.5, 1, "stop"),
        ],
    ),
    "prime_rl/token_exports/step_2": (
        "prime-rl",
        [([1, 2, 3], [0, 1, 1], NAN, 0, ""), ([1, 4], [0, 1], NAN, 1, "")],
    ),
    # An endpoint without token ids: messages only, a group is a task.
    "verifiers/traces.jsonl": (
        "verifiers",
        [
            (*chars("U:1+1=A:", "2"), 1.0, 0, "stop"),
            (*chars("U:1+1=A:", "4"), 0.0, 1, "stop"),
            (*chars("U:1+1=A:", "33"), 0.25, 0, "length"),
            (*chars("U:1+1=A:", "3"), NAN, 0, "stop"),
        ],
    ),
    # Aborted and failed rows are failures; a removed one counts for its group; one that never began is left out.
    "slime": (
        "slime",
        [
            ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], 1.0, 0, "stop"),
            ([1, 2, 6, 6], [0, 0, 1, 1], 0.0, 0, "length"),
            ([1, 7, 8], [0, 0, 1], NAN, 1, "abort"),
            ([1, 7, 9], [0, 0, 0], 0.5, 1, "stop"),
            ([1, 7, 9], [0, 0, 1], NAN, 1, ""),
        ],
    ),
    "trl": (
        "trl",
        [
            (*chars("U:1+1=A:", "2"), 1.0, 0, ""),
            (*chars("U:1+1=A:", "3"), 0.0, 0, ""),
            (*chars("U:2+2=A:", "4"), NAN, 1, ""),
            (*chars("U:2+2=A:", "five"), 0.5, 1, ""),
        ],
    ),
}


def dump(name: str, folder: Path) -> Path:
    """Return a dump; those that are no text are made as their tool makes them."""
    if name == "slime":
        import torch

        samples = [json.loads(line) for line in (DATA / "slime" / "samples.jsonl").read_text().splitlines()]
        (folder / "rollout_data").mkdir()
        torch.save({"rollout_id": 3, "samples": samples}, folder / "rollout_data" / "3.pt")
        return folder / "rollout_data"
    if name == "trl":
        pandas = pytest.importorskip("pandas", reason="TRL writes its tables with pandas")
        table = {
            "step": [4] * 4,
            "prompt": [[{"role": "user", "content": text}] for text in ("1+1=", "1+1=", "2+2=", "2+2=")],
            "completion": [[{"role": "assistant", "content": text}] for text in ("2", "3", "4", "five")],
            "accuracy": [1.0, 0.0, NAN, 0.5],
            "tag": ["a", None, None, "b"],
            "advantage": [0.5, -0.5, 0.0, 0.0],
        }
        (folder / "completions").mkdir()
        pandas.DataFrame(table).to_parquet(folder / "completions" / "completions_00004.parquet")
        return folder / "completions"
    return DATA / name


@pytest.mark.parametrize("name", WANTED)
def test_each_row_is_what_its_writer_says(tmp_path: Path, chat_tokenizer: Any, name: str):
    """Ids, masks, rewards, groups and finish reasons, computed by hand from the tool's own writer."""
    tool, wanted = WANTED[name]
    says = name.startswith("verl")  # which does not tell whether tools spoke
    report = import_files([dump(name, tmp_path)], tmp_path / "store", tokenizer=chat_tokenizer, one_turn=says)
    assert {file.format for file in report.files} == {tool}
    found = rows_of(tmp_path / "store")
    assert len(found) == len(wanted)
    for row, hand in zip(found, wanted, strict=True):
        assert row[:2] == hand[:2]
        assert np.array_equal(row[2], hand[2], equal_nan=True)
        assert row[3:] == hand[3:]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("verl/limited/7.jsonl", ["", "timeout", "grader_error"]),
        ("slime", ["", "", "engine", "", "tool_error"]),
        ("open_instruct", ["", "", "", "timeout", ""]),
        ("prime_rl/rollouts/step_9/train/all", ["", "", "", "engine", ""]),
        ("verifiers/traces.jsonl", ["", "", "", "timeout"]),
    ],
)
def test_rows_that_failed_are_failed(tmp_path: Path, chat_tokenizer: Any, name: str, wanted: list[str]):
    """The kind of the failure is stored, and that the reward is not to be trusted; what the tool put there is kept."""
    says = name.startswith("verl")
    report = import_files([dump(name, tmp_path)], tmp_path / "store", tokenizer=chat_tokenizer, one_turn=says)
    assert column(tmp_path / "store", "failure_reason") == wanted
    assert column(tmp_path / "store", "reward_trusted").tolist() == [not kind for kind in wanted]
    assert report.num_failed == sum(map(bool, wanted))
    if name.startswith("verl"):
        assert [json.loads(meta).get("untrusted_reward") for meta in column(tmp_path / "store", "meta")] == [None, 0, 0]


def test_values_beside_the_tokens(tmp_path: Path, chat_tokenizer: Any):
    """Log-probs, advantages and versions come to the tokens and rows that they are of."""
    for name in (
        "nemo_rl/train_data_step4.jsonl",
        "prime_rl/rollouts/step_9/train/all",
        "slime",
        "trl",
        "open_instruct",
    ):
        import_files([dump(name, tmp_path)], tmp_path / name.partition("/")[0], tokenizer=chat_tokenizer)
    same = {"equal_nan": True}
    nemo = column(tmp_path / "nemo_rl", "log_probs")
    assert np.array_equal(nemo[0], np.array([NAN, NAN, -0.5, NAN, -0.25], np.float32), **same)
    assert column(tmp_path / "nemo_rl", "advantage").tolist() == np.array([0.7, -0.7, 0, 0], np.float32).tolist()
    assert column(tmp_path / "nemo_rl", "policy_version").tolist() == [3] * 4
    prime = column(tmp_path / "prime_rl", "log_probs")
    assert np.array_equal(prime[0], np.array([NAN] * 4 + [-0.5, NAN, -1.5, -0.25], np.float32), **same)
    assert column(tmp_path / "prime_rl", "advantage")[:3].tolist() == [0.5, 0.0, -0.5]
    assert column(tmp_path / "prime_rl", "policy_version").tolist() == [8] * 5
    assert np.array_equal(
        column(tmp_path / "slime", "log_probs")[0], np.array([NAN, NAN, -0.5, NAN, -0.25], np.float32), **same
    )
    assert column(tmp_path / "slime", "policy_version").tolist() == [3] * 5
    assert column(tmp_path / "trl", "policy_version").tolist() == [3] * 4
    assert column(tmp_path / "trl", "advantage").tolist() == [0.5, -0.5, 0.0, 0.0]
    scores = column(tmp_path / "open_instruct", "log_probs")
    assert np.array_equal(
        scores[1], np.array([NAN, NAN, -0.3, NAN], np.float32), **same
    )  # NaN: an end token that was added
    assert json.loads(column(tmp_path / "open_instruct", "meta")[0])["answer"] == "2"


def test_an_empty_completion_counts_for_its_group(tmp_path: Path, jsonl: Write):
    """Where its tool graded it: left out, it would raise the mean that the others are compared with."""
    import torch

    slime = json.loads((DATA / "slime" / "samples.jsonl").read_text().splitlines()[0])
    none = {"response": "", "response_length": 0, "reward": -1.0, "loss_mask": None, "rollout_log_probs": None}
    torch.save({"rollout_id": 3, "samples": [slime, slime | none | {"tokens": [1, 2]}]}, tmp_path / "3.pt")
    nemo = json.loads((DATA / "nemo_rl" / "train_data_step4.jsonl").read_text().splitlines()[0])
    (mask,) = nemo["token_loss_mask"]
    zero = {"token_loss_mask": [[0] * len(mask)], "rewards": [-1.0], "input_lengths": [mask.index(1)]}
    prime = json.loads((DATA / "prime_rl/rollouts/step_9/train/all/traces.jsonl").read_text().splitlines()[0])
    (trace,) = prime["traces"]
    said = next(place for place, node in enumerate(trace["nodes"]) if node.get("sampled"))
    cut_off = trace["nodes"][said] | {"token_ids": [], "mask": [], "logprobs": [], "advantages": []}
    cut_off = trace | {"nodes": [*trace["nodes"][:said], cut_off], "rewards": {"one": {"score": -1.0, "weight": 1.0}}}
    episodes = [prime, prime | {"traces": [cut_off]}, prime | {"traces": [], "ok": False}]
    for name, file, left_out in (
        ("slime", tmp_path / "3.pt", 0),
        ("nemo", jsonl([nemo, nemo | zero], "train_data_step4.jsonl"), 0),
        ("prime", jsonl(episodes, "traces.jsonl"), 1),
    ):
        report = import_files([file], tmp_path / name)
        (one, two), (_, reward) = rows_of(tmp_path / name), column(tmp_path / name, "task_reward")
        assert (one[3], two[3], reward, any(two[1])) == (0, 0, -1.0, False)
        assert report.files[0].num_left_out == left_out


def test_several_answers_of_open_instruct_are_the_answer(tmp_path: Path, jsonl: Write):
    """Its ground truth may be a list of texts; only token ids are no text."""
    row = json.loads((DATA / "open_instruct" / "run_rollouts_000000.jsonl").read_text().splitlines()[0])
    file = jsonl([row | {"ground_truth": ["2", "two"]}, row | {"ground_truth": [5, 6]}])
    import_files([file], tmp_path / "store")
    first, second = (json.loads(meta)["answer"] for meta in column(tmp_path / "store", "meta"))
    assert (json.loads(first), second) == (["2", "two"], None)


def test_what_a_file_lacks_is_reported(tmp_path: Path, chat_tokenizer: Any):
    """The report counts what stays unknown, and the file's report names it."""
    report = import_files([DATA / "verl" / "ray"], tmp_path / "store", tokenizer=chat_tokenizer, one_turn=True)
    assert (report.num_unended, report.num_encoded, report.num_without_log_probs) == (4, 4, 4)
    said = " ".join(report.files[0].lacks)
    assert "special tokens" in said
    assert "end token" in said
    masked = import_files([DATA / "open_instruct"], tmp_path / "masked")
    assert (masked.num_masked, masked.num_failed) == (2, 1)


def test_the_score_of_verl_with_a_penalty_is_asked_for(tmp_path: Path, jsonl: Write, tokenizer: Any):
    """DAPO's manager writes the score with the overlong penalty or without it, and the file does not tell."""
    row = {"input": "a", "output": "b", "gts": "", "score": 1.0, "step": 1, "overlong_reward": -0.25, "overlong": True}
    file = jsonl([row, row | {"score": 0.5}])
    with pytest.raises(DefinitionError, match=r"--field reward=score\+overlong_reward"):
        import_files([file], tmp_path / "store", tokenizer=tokenizer)
    fields = {"reward": "score+overlong_reward"}
    import_files([file], tmp_path / "store", tokenizer=tokenizer, fields=fields, one_turn=True)
    assert column(tmp_path / "store", "task_reward").tolist() == [0.75, 0.25]


@pytest.mark.parametrize("said", ["2", "x<tool_response>2</tool_response>y", "a<|start_header_id|>tool b", "[INST]c"])
def test_text_is_one_turn_only_where_that_is_known(tmp_path: Path, jsonl: Write, chat_tokenizer: Any, said: str):
    """A writer that may let an environment speak is asked about once for the file, whatever its text looks like."""
    verl = [{"input": "a", "gts": "", "score": float(i), "step": 1, "output": said} for i in range(2)]
    skyrl = json.loads((DATA / "skyrl" / "turns" / "search.jsonl").read_text()) | {"output_response": said}
    trl = [{"step": 1, "prompt": "a", "completion": said, "right": float(i), "advantage": i - 0.5} for i in range(2)]
    trl_talk = [row | {"completion": [{"role": "assistant", "content": said}]} for row in trl]
    plain = [{"prompt": "a", "completion": said, "reward": float(i)} for i in range(2)]
    for name, rows, known in (
        ("verl", verl, False),
        ("skyrl", [skyrl, skyrl | {"score": 0.5}], False),
        ("trl", trl, False),
        ("trl_talk", trl_talk, True),
        ("plain", plain, True),
    ):
        file = jsonl(rows, f"{name}/rollouts.jsonl")
        if not known:
            with pytest.raises(DefinitionError, match=r"rollouts\.jsonl: the completions are text.*--one-turn"):
                import_files([file], tmp_path / name / "store", tokenizer=chat_tokenizer, skip_bad=9)
            assert not (tmp_path / name / "store").exists()
        report = import_files([file], tmp_path / name / "store", tokenizer=chat_tokenizer, one_turn=not known)
        assert report.num_imported == 2


def test_an_end_token_within_text_is_two_turns(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """Whatever the user says of them: what stands after an end token was sampled in another turn."""
    said = json.loads((DATA / "skyrl" / "turns" / "search.jsonl").read_text()) | {"output_response": "yes<eos>"}
    file = jsonl([said | {"output_response": "a<eos>b<eos>"}, said, said | {"score": 0.5}], "mine.jsonl")
    with pytest.raises(DataError, match=r":1: .*2 turns"):
        import_files([file], tmp_path / "c", tokenizer=chat_tokenizer, one_turn=True)
    report = import_files([file], tmp_path / "c", tokenizer=chat_tokenizer, one_turn=True, skip_bad=1)
    assert (report.num_imported, len(report.files[0].bad)) == (2, 1)


def test_rewards_in_a_dict_are_asked_for(tmp_path: Path):
    """The reward of slime may be a dict; the run's key is named as a dotted path."""
    import torch

    samples = [json.loads(line) for line in (DATA / "slime" / "samples.jsonl").read_text().splitlines()][:2]
    samples = [sample | {"reward": {"score": sample["reward"], "brief": 1.0}} for sample in samples]
    torch.save({"rollout_id": 3, "samples": samples}, tmp_path / "3.pt")
    with pytest.raises(DefinitionError, match=r"dicts with these keys: score, brief\. .*--field reward=reward\.score"):
        import_files([tmp_path / "3.pt"], tmp_path / "store")
    import_files([tmp_path / "3.pt"], tmp_path / "store", fields={"reward": "reward.score+0.5*reward.brief"})
    assert column(tmp_path / "store", "task_reward").tolist() == [1.5, 0.5]


def test_files_of_torch_that_hold_objects_are_not_loaded(tmp_path: Path):
    """Nothing in a .pt file is executed, and what is no dump is named."""
    import torch

    torch.save({"samples": [Path("x")]}, tmp_path / "a.pt")
    with pytest.raises(DataError, match=r"a\.pt cannot be read as tensors and plain values"):
        import_files([tmp_path / "a.pt"], tmp_path / "store")
    torch.save({"weights": torch.zeros(2)}, tmp_path / "b.pt")
    with pytest.raises(DataError, match=r"b\.pt has no list 'samples'"):
        import_files([tmp_path / "b.pt"], tmp_path / "store")


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: f"{tool.name} {tool.summary}")
def test_a_row_without_one_of_the_fields_is_another_tools(tool: Any):
    """A file is a tool's only with every field that its writer writes; similar names do not count."""
    row = dict.fromkeys(tool.signature, 1)
    for name in tool.signature:
        less = {key: value for key, value in row.items() if key != name}
        assert find_tool("auto", less) is not tool
        with pytest.raises(DefinitionError, match=r"its rows lack required fields"):
            find_tool(tool.name, {"x": 1})


@pytest.mark.parametrize("name", [name for name in WANTED if name != "slime"])
def test_the_order_of_rows_means_nothing(tmp_path: Path, chat_tokenizer: Any, name: str):
    """A dump whose rows were shuffled gives the same trajectories in the same groups."""
    given = dump(name, tmp_path)
    folder = tmp_path / "shuffled" / Path(name).with_suffix("")
    for file in [given] if given.is_file() else sorted(given.rglob("*.*")):
        place = folder / file.name if given.is_file() else folder / file.relative_to(given)
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".parquet":
            pandas = pytest.importorskip("pandas")
            pandas.read_parquet(file).iloc[[2, 0, 3, 1]].to_parquet(place)
        else:
            lines = file.read_text().splitlines(keepends=True)
            place.write_text("".join(lines[1::2] + lines[::2]))
    found: list[list[Any]] = []
    for at, path in enumerate((given, folder)):
        import_files([path], tmp_path / f"{at}", tokenizer=chat_tokenizer, one_turn=name.startswith("verl/"))
        rows = rows_of(tmp_path / f"{at}")
        groups: dict[int, list[str]] = {}
        for row in rows:
            groups.setdefault(row[3], []).append(repr((*row[:3], row[4])))
        found.append(sorted(sorted(members) for members in groups.values()))
    assert found[0] == found[1]


def test_a_table_of_tools_is_refused_in_a_sentence(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """TRL writes the turns of tools as messages: which tokens were sampled is not in them."""
    talk = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}]
    talk += [{"role": "tool", "name": "add", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    row = {
        "step": 1,
        "prompt": [{"role": "user", "content": "1+1"}],
        "completion": talk,
        "right": 1.0,
        "advantage": 0.0,
    }
    with pytest.raises(
        DataError, match=r":1: field 'completion' contains messages \(assistant, tool, assistant\) but has no token ids"
    ):
        import_files([jsonl([row, row])], tmp_path / "store", tokenizer=chat_tokenizer, one_turn=True)
    two = {**{key: value for key, value in row.items() if key != "advantage"}, "brief": 0.5, "advantage": 0.0}
    two["completion"] = talk[-1:]
    with pytest.raises(DefinitionError, match=r"has several numeric columns: .*right, brief\. "):
        import_files([jsonl([two, two])], tmp_path / "two", tokenizer=chat_tokenizer)
    import_files([jsonl([two, two])], tmp_path / "two", tokenizer=chat_tokenizer, fields={"reward": "right+2*brief"})
    assert column(tmp_path / "two", "task_reward").tolist() == [2.0, 2.0]


def test_validations_of_nemo_rl_are_evaluations(tmp_path: Path, jsonl: Write, chat_tokenizer: Any):
    """`val_data_stepN.jsonl` holds conversations and rewards; its rows are marked."""
    talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    rows = [{"content": [talk], "rewards": [float(i)], "idx": i} for i in range(2)]
    report = import_files([jsonl(rows, "val_data_step7.jsonl")], tmp_path / "store", tokenizer=chat_tokenizer)
    assert report.files[0].format == "nemo-rl"
    assert column(tmp_path / "store", "evaluation").tolist() == [True, True]
    assert column(tmp_path / "store", "policy_version").tolist() == [7, 7]
    assert len(set(column(tmp_path / "store", "group_id").tolist())) == 1
