"""The tools whose dumps `import` reads: of each what its current writer writes, and nothing like it.

A tool is a function from a row to records. Its docstring names the writer and what the fields mean; what the summary
reports about it is built from the fields that the function takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from rlhf_pipeline.exchange.fields import MESSAGES, NONE, DerivedField, Fields, cut, part_of
from rlhf_pipeline.exchange.tools import agent_logs as _agent_logs  # noqa: F401 - registers its tools
from rlhf_pipeline.exchange.tools import atif as _atif  # noqa: F401 - registers its tool
from rlhf_pipeline.exchange.tools import inspect_logs as _inspect_logs  # noqa: F401 - registers its tool
from rlhf_pipeline.exchange.tools.registry import (
    NO_END,
    NO_SCORES,
    NO_TOKENS,
    REGISTERED,
    RawRollouts,
    Tool,
    or_unknown,
    tool,
)
from trajectory_store import Column
from trajectory_store.recorder.raw_rollout import (
    CUT,
    UNKNOWN_VERSION,
    VALUES,
    RawRollout,
    Row,
    as_failure,
    as_ids,
    as_int,
    as_list,
    as_mask,
    as_number,
    as_reward,
    excerpt,
    is_messages,
    message_text,
)


def _numbered(row: Fields, name: str, pattern: str) -> str:
    """Return the unit of a file that is written once per step, by the number in its name; empty without one."""
    number = row.number_in(pattern)
    return "" if number is None else f"{name} {number}"


# -- TRL, verl, slime --------------------------------------------------------------------------------------------------

_TRL = ("step", "prompt", "completion", "advantage")


def _columns(row: Row) -> list[str]:
    """Return the columns of a table, without the index that pandas writes of one whose rows were moved."""
    return [name for name in row if not str(name).startswith("__index_level_")]


def _rewards_of_trl(row: Fields) -> dict[str, str]:
    """Return the one column of numbers that may be the reward, unless the user names it."""
    if "reward" in row.field_paths:
        return {}
    values = {name: row.row[name] for name in _columns(row.row) if name not in _TRL}
    numbers = [name for name, value in values.items() if value is None or isinstance(value, (bool, int, float))]
    if len(numbers) > 1 and row.for_display:
        return {"reward": "+".join(numbers)}  # TRL's weights are 1 unless the user changed them
    if len(numbers) > 1:
        raise DefinitionError(
            f"the file has several numeric columns: {', '.join(numbers)}. Choose one of them as the reward, or a sum "
            f"of several with the weights used in training: --field reward={numbers[0]} or --field "
            f"reward={numbers[0]}+0.5*{numbers[1]}"
        )
    if not numbers:
        raise DefinitionError(f"there is no reward column. {row.describe_row()} Specify it: --field reward=NAME")
    return {"reward": numbers[0]}


@tool(
    *("trl", "the completions table of TRL's GRPOTrainer", " ".join(_TRL)),
    *(NO_TOKENS, NO_END, NO_SCORES, "the weights of the reward functions"),
    also=lambda row: _columns(row)[:3] == ["step", "prompt", "completion"] and _columns(row)[-1] == "advantage",
    first_row_tells=_rewards_of_trl,
    repeated_but="step",
    unit=lambda row: f"step {row.row['step']}",
)
def trl(row: Fields) -> RawRollouts:
    """TRL 1.16: the completions table of `GRPOTrainer(log_completions=True)`, `completions/completions_STEP.parquet`.

    Writer: `GRPOTrainer.log` in `trl/trainer/grpo_trainer.py`. Columns in this order: `step`, counted from 1; `prompt`
    and `completion`, text or messages; one column per reward function, called after it; those of `log_extra`;
    `advantage`. The weights of the functions are not written, nor which columns are rewards. Completions are decoded
    without special tokens. Rows of one prompt are adjacent. Each log writes the last generation, also where several
    steps are taken on it, and after an evaluation that one's rows, which nothing marks. A completion that no function
    could score has NaN in all of them. A completion in messages
    records its turns; one that is text may be of a `rollout_func` with an environment.
    """
    step, prompt = as_int(row.value("step"), "step"), row.value("prompt")
    yield row.record(
        prompt="prompt",
        completion="completion",
        advantage="advantage",
        policy_version=DerivedField("step-1", max(step - 1, 0)),
        failure=DerivedField("", ""),
        group=DerivedField("step and prompt", (step, repr(prompt))),
        one_turn=is_messages(row.value("completion")),
        flags={"as_chat": False, "by_prompt": True},
    )


@tool(
    *("verl", "verl's rollout_data_dir dumps", "input output gts score step", NO_TOKENS),
    *("special tokens: verl removes the chat markup of prompts", NO_END, NO_SCORES),
    unit=lambda row: _numbered(row, "step", r"/(\d+)\.jsonl"),
)
def verl(row: Fields) -> RawRollouts:
    """Verl 0.9.1: `trainer.rollout_data_dir/STEP.jsonl`, of both trainers.

    Writer: `_write_generations` in `verl/trainer/ppo/ray_trainer.py` (`RayPPOTrainer`) and in
    `verl/trainer/ppo/v1/trainer_base.py` (`trainer.use_v1`). Fields of both: `input` and `output`, the prompt and the
    response decoded without special tokens, with the words of tools where there are some; `gts`, the ground truth;
    `score`, the sum of the token scores; `step`, counted from 1. `RayPPOTrainer` adds what the reward function gave and
    `request_id`, in the order of balanced batches, without any id of the prompt: a group is the rows of a step with one
    prompt and ground truth. The v1 trainer adds `uid`, the key `PROMPT_SESSION_OUTPUT` of each sample: a group is one
    PROMPT.

    What the reward function gave may overwrite `score` (`base_data[k] = v`): a function that returns a dict under
    DAPO's manager puts its own score there, without the overlong penalty, which is then in `overlong_reward`. The
    manager `limited` records `timeout` and `error` for a failed grading, whose score is 0. `overlong` is true where
    the response went beyond what DAPO punishes.

    `_validate` of both writes `trainer.validation_data_dir/STEP.jsonl` in the same way, after the update of that step,
    or as step 0 before the first, and always with `reward`, the sum of the token scores, which nothing overwrites. By
    it evaluations are known: a training has it only where a reward function gives one of that name.
    """
    values, step = row.row, as_int(row.value("step"), "step")
    evaluation = step == 0 or ("reward" in values and "request_id" not in values)
    if values.get("overlong_reward") is not None and "reward" not in row.field_paths and not evaluation:
        raise DefinitionError(
            "the rows have the fields score and overlong_reward, and verl's DAPO manager writes the score with or "
            "without the overlong penalty. Choose one: --field reward=score (for a reward function that returns a "
            "number) or --field reward=score+overlong_reward (for a function that returns a dict)"
        )
    uid = re.match(r"(.+)_\d+_\d+\Z", str(values.get("uid")))
    by_prompt = DerivedField("step, input and gts", (step, "input", str(values["input"]), str(values["gts"])))
    group = DerivedField("uid", (step, uid[1])) if uid else by_prompt
    failed = as_failure(values.get("error"), "error") if isinstance(values.get("error"), str) else ""
    yield row.record(
        prompt="input",
        completion="output",
        reward="reward" if evaluation and "reward" in values else "score",
        answer="gts",
        policy_version=DerivedField("step", step) if evaluation else DerivedField("step-1", max(step - 1, 0)),
        finish_reason=DerivedField("overlong", CUT) if values.get("overlong") else None,
        failure=DerivedField(
            "timeout, error", "timeout" if values.get("timeout") is True else failed and "grader_error"
        ),
        group=group,
        one_turn=False,
        flags={"as_chat": False, "evaluation": evaluation, "by_prompt": uid is None},
    )


_SLIME = {"completed": ("stop", ""), "truncated": ("length", ""), "aborted": ("abort", "engine")}
_SLIME |= {"failed": ("", "tool_error"), "pending": ("", "engine")}
"""For each status, why the response ended, and the kind of failure. slime uses `failed` for a tool or an API."""


@tool(
    *("slime", "slime's debug rollout data", "group_index index prompt tokens response response_length label reward "
    "loss_mask weight_versions rollout_log_probs remove_sample status metadata"),
    unit=lambda row: _numbered(row, "rollout", r"(\d+)\.pt\Z"),
)  # fmt: skip
def slime(row: Fields) -> RawRollouts:
    """Slime 0.3.1 (commit 624b824): `--save-debug-rollout-data PATH/{rollout_id}.pt`, or `--dump-details`.

    Writer: `save_debug_rollout_data` in `slime/observability/rollout_data_utils.py`: a file of `torch.save`, of an
    evaluation `eval_{rollout_id}.pt`, with `rollout_id` and `samples`, each `Sample.to_dict()` of
    `slime/utils/types.py`. Fields: `group_index`, `index`;
    `prompt`, text or messages; `tokens`, prompt and response; `response`, `response_length`; `reward`, a number or a
    dict, of which the run's `--reward-key` names one; `loss_mask`, per response token, or None for all;
    `rollout_log_probs`, per response token, 0 for what was not sampled; `status`, `completed`, `truncated`, `aborted`,
    `failed` or `pending`; `remove_sample`, whose mask slime sets to 0; `weight_versions`; `label`; `metadata`. The
    version is that of the rollout, `rollout_id`.
    """
    values = row.row
    size, tokens = as_int(values["response_length"], "response_length"), as_ids(values["tokens"], "tokens")
    if not 0 <= size <= len(tokens):
        raise DataError(f"response_length is {size}, but there are {len(tokens)} tokens.")
    if values["status"] not in _SLIME:
        raise DataError(f"field 'status' must be one of {', '.join(_SLIME)}, got {values['status']!r}.")
    reason, failure = _SLIME[str(values["status"])]
    if failure and not size:
        yield None
        return
    if isinstance(values["reward"], dict) and "reward" not in row.field_paths:
        keys = [*map(str, values["reward"])]
        raise DefinitionError(
            f"the rewards are dicts with these keys: {', '.join(keys)}. Select the key that the run used as its "
            f"--reward-key: --field reward=reward.{keys[0]}"
        )
    start = len(tokens) - size
    yield row.record(
        prompt="prompt",
        completion="response",
        prompt_ids=DerivedField("tokens", tokens[:start]),
        completion_ids=DerivedField("the last response_length tokens", tokens[start:]),
        completion_mask="loss_mask",
        log_probs="rollout_log_probs",
        reward="reward",
        answer="label",
        finish_reason=DerivedField("status", reason),
        failure=DerivedField("status", failure),
        policy_version=DerivedField(
            "rollout_id of the file's name", or_unknown(row.number_in(r"(?:eval_)?(\d+)\.pt\Z"))
        ),
        group=None if values["group_index"] is None else DerivedField("group_index", values["group_index"]),
        meta=("index", "status", "metadata", "weight_versions", "remove_sample"),
        flags={
            "mask_known": not values["remove_sample"],
            "evaluation": row.number_in(r"eval_(\d+)\.pt\Z") is not None,
        },
    )


# -- verifiers and prime-rl --------------------------------------------------------------------------------------------

_LIMITS = {"max_turns": "turns"}
_LIMITS |= dict.fromkeys(
    ("max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length", "compaction_failed"), "length"
)
"""Stop conditions that mark a trace as truncated (`Trace.is_truncated`)."""
_ENGINE = ("ProviderError", "InterceptionError", "TunnelError")


def _is_trained(row: Row) -> bool:
    return part_of(row, "run").get("type") == "train"


@tool("prime-rl", "episodes of prime-rl's rollouts", "env task ok traces",
      "token ids and log-probs, if the endpoint returned none", also=_is_trained)  # fmt: skip
@tool("verifiers", "episodes of verifiers' evaluations", "env task ok traces",
      "token ids and log-probs, if the endpoint returned none", also=lambda row: not _is_trained(row))  # fmt: skip
def episodes(row: Fields) -> RawRollouts:
    """Verifiers 0.4 and prime-rl 0.8: episodes, `traces.jsonl`.

    Writers: `write_episode` in `verifiers/v1/utils/trace_store.py` (verifiers 0.4.0), and `FileMonitor.log_episodes` in
    `src/prime_rl/monitors/file.py` (prime-rl 0.8.0, commit 559b447), which writes `Episode.to_record()` under
    `rollouts/step_N/KIND/SUBSET/`: those of SUBSET effective are in all, too. Later ones (commit 048a6e2) append all
    episodes to `traces/stream/NNNNN.jsonl`, seal a full chunk as `.jsonl.zst`, and write advantages as annotations.
    A row is an `Episode` of
    `verifiers/v1/episode.py`: `env`, `task`, `group` (its `id`, in training), `run`, `ok`, `is_timeout`, `errors`,
    `traces`. A trace (`verifiers/v1/trace.py`) has `agent`, `nodes`, `calls`, `rewards` (score and weight by name),
    `ok`, `errors`, `stop_condition`. A node (`verifiers/v1/graph.py`) is a message with the tokens that it adds:
    `token_ids`, `mask`, and `logprobs` and `advantages` of its sampled tokens, rounded to 4 decimals; `parent` is the
    message before it. What is null is not written.

    Each path from a root to a leaf is one trajectory; a compaction that was not taken up is none (`Trace.branches`).
    Its reward is the trace's. Without an endpoint that gives token ids (most evaluations) only the messages are there.
    A group is `group.id`, else the episodes of one task (`task.key`, `task.hash`), of each agent by itself.
    """
    if not as_list(row.row["traces"], "traces"):
        yield None  # it failed before anything was sampled
    for trace in row.row["traces"]:
        paths = [
            (branch, path)
            for branch, path in _paths(trace)
            if any(trace["nodes"][place].get("sampled") for place in path)
        ]
        if not part_of(trace, "agent").get("trainable", True) or not paths:
            yield None
            continue
        for branch, path in paths:
            yield _trajectory(row, trace, branch, path)


def _trajectory(row: Fields, trace: Row, branch: int, path: Sequence[int]) -> RawRollout:
    agent, task, env = part_of(trace, "agent"), part_of(trace, "task"), part_of(row.row, "env")
    rewards = [reward for reward in part_of(trace, "rewards").values() if reward is not None]
    path_calls = [call for call in trace.get("calls") or () if call.get("node") in path]
    calls = [call for call in path_calls if call.get("finish_reason")]
    limit = _LIMITS.get(str(trace.get("stop_condition")))
    work = part_of(part_of(row.row, "run"), "work")
    version = part_of(work, "policy").get("start", work.get("step"))
    key = part_of(row.row, "group").get("id") or task.get("key") or task.get("hash") or json.dumps(task, sort_keys=True)
    meta = {"env": env.get("name") or env.get("id"), "agent": agent.get("name"), "trace": trace.get("id")}
    identity = (
        None if trace.get("id") is None else _branch_identity(trace["id"], branch, evaluation=_is_evaluation(row))
    )
    return row.of(trace).record(
        _tokens([trace["nodes"][place] for place in path]),
        reward=DerivedField("sum of rewards[].score*weight", sum(map(_weighed, rewards)) if rewards else None),
        finish_reason=DerivedField(
            "the last of calls[].finish_reason", limit or (calls[-1]["finish_reason"] if calls else "")
        ),
        failure=DerivedField("ok, errors", _failure(row.row, trace)),
        answer=DerivedField("task.data.answer", part_of(task, "data").get("answer")),
        policy_version=DerivedField("run.work.policy.start", or_unknown(version)),
        temperature=DerivedField("calls[].sampling.temperature", _temperature(path_calls)),
        group=DerivedField("group.id or task.key", (key, agent.get("name"))),
        meta=meta | {"stop_condition": trace.get("stop_condition")},
        flags={
            "identity": identity,
            "one_prompt": False,
            "across_files": part_of(row.row, "group").get("id") is not None,
            "evaluation": _is_evaluation(row),
        },
    )


def _temperature(calls: Sequence[Row]) -> float | None:
    """Return the temperature that all calls of a trajectory name; None where they do not."""
    temperatures = {part_of(call, "sampling").get("temperature") for call in calls}
    return temperatures.pop() if len(temperatures) == 1 else None


def _is_evaluation(row: Fields) -> bool:
    """Return True for an episode of prime-rl's evaluations: it records this itself, and so does its folder."""
    work = part_of(part_of(row.row, "run"), "work")
    folder = row.path.parts[-3] if len(row.path.parts) > 2 else ""
    return _is_trained(row.row) and (work.get("type") == "eval" or folder == "eval")


def _failure(row: Row, trace: Row) -> str:
    if trace.get("is_timeout") or row.get("is_timeout"):
        return "timeout"  # `ok` all the same: what was reached by then is graded, and after `scoring_timeout` not all
    if trace.get("ok") and row.get("ok"):
        return ""
    errors = [*(row.get("errors") or ()), *(trace.get("errors") or ())]
    kind = errors[-1].get("type") if errors else ""
    return "engine" if kind in _ENGINE else "grader_error" if kind == "TaskError" else "tool_error"


def _weighed(item: Any) -> float:
    if not isinstance(item, Mapping) or "score" not in item:
        raise DataError("field 'rewards' must contain objects with a score and a weight.")
    return as_reward(item["score"], "score") * as_reward(item.get("weight", 1.0), "weight")


def _branch_identity(trace_id: str, branch: int, *, evaluation: bool) -> tuple[str, str, int, bool]:
    return "trace", trace_id, branch, evaluation


def is_annotation(row: Row) -> bool:
    """Return True for an update of a trace, which prime-rl writes when it has learned from it."""
    return {"trace_id", "branches"} <= row.keys()


EFFECTIVE = Column("effective", "bool", mutable=True, fill=False)
"""Marks what prime-rl trained on, as its annotations report it. Only a store with annotations has the column."""


class TraceUpdate(NamedTuple):
    """The fields that prime-rl reports about a trajectory after its episode."""

    identity: tuple[str, str, int, bool]
    advantage: float | None
    effective: bool


def updates_of(row: Row) -> Iterator[TraceUpdate]:
    """Yield what an update of a trace reports of each of its trajectories.

    prime-rl (commit 048a6e2): `traces/annotations/PRODUCER/NNNNN.jsonl`. Writer: `make_update` in
    `src/prime_rl/monitors/file/traces/update.py`. `branches` has, by the `index` of a leaf, `advantages` per token of
    the path, null where a token was not sampled. `info` has `effective`, true for a trace that a training step used,
    and `advantage`, of the trace. A later update without one of these leaves what an earlier one gave.
    """
    info = part_of(row, "info")
    effective, of_trace = info.get("effective") is True, info.get("advantage")
    for branch in as_list(row["branches"], "branches") or [{"index": 0}]:
        values = [value for value in branch.get("advantages") or () if value is not None]
        scalar = [of_trace] if isinstance(of_trace, int | float) else []
        advantage = VALUES["advantage"](values or scalar, "advantages") if values or scalar else None
        if advantage is not None or effective:
            identity = _branch_identity(str(row["trace_id"]), as_int(branch["index"], "index"), evaluation=False)
            yield TraceUpdate(identity, advantage, effective)


def _paths(trace: Row) -> Iterator[tuple[int, list[int]]]:
    """Yield each path from a root to a leaf that is a training sample: the leaf number and the node positions."""
    nodes = as_list(trace.get("nodes") or [], "nodes")
    links = [node.get("semantic_parents") or () for node in nodes]
    accepted = {link["node"] for of in links for link in of if link["type"] == "compaction"}
    parents = {node.get("parent") for node in nodes}
    leaves = [place for place in range(len(nodes)) if place not in parents]
    for branch, leaf in enumerate(leaves):
        attempt = any(link["type"] == "compaction_attempt" for link in links[leaf])
        if attempt and leaf not in accepted:
            continue
        path, place = [], leaf
        while place is not None:
            if not 0 <= place < len(nodes) or len(path) > len(nodes):
                raise DataError(
                    "the nodes do not form a tree: their parents are "
                    f"{json.dumps([n.get('parent') for n in nodes])[:80]}"
                )
            path.append(place)
            place = nodes[place].get("parent")
        yield branch, path[::-1]


def _tokens(nodes: Sequence[Row]) -> dict[str, DerivedField]:
    """Return the tokens of a path of messages, with their values, and its text."""
    first = next(place for place, node in enumerate(nodes) if node.get("sampled"))
    messages = [part_of(node, "message") for node in nodes]
    if not any(node.get("token_ids") for node in nodes):
        return {
            "prompt": DerivedField("messages", messages[:first]),
            "completion": DerivedField("messages", messages[first:]),
        }
    names = {"log_probs": "logprobs", "advantage": "advantages", "ref_log_probs": "reference_logprobs"}
    whole = {
        target: DerivedField(name, [])
        for target, name in {"tokens": "token_ids", "completion_mask": "mask", **names}.items()
    }
    for node in nodes:
        ids, mask = as_ids(node.get("token_ids") or [], "token_ids"), as_mask(node.get("mask") or [], "mask")
        if len(mask) != len(ids):
            raise DataError(f"a node has {len(ids)} token_ids, but its mask has {len(mask)} entries.")
        whole["tokens"].value.extend(ids)
        whole["completion_mask"].value.extend(mask)
        for target, name in names.items():
            values = as_list(node.get(name) or [], name)
            if len(values) not in (0, sum(mask)):
                raise DataError(f"a node has {sum(mask)} sampled tokens, but {len(values)} {name}.")
            each = iter(values)
            whole[target].value.extend(next(each, None) if on else None for on in mask)
    if all(value is None for value in whole["ref_log_probs"].value):
        del whole["ref_log_probs"]
    texts = [message_text(message) for message in messages]
    text = {
        "prompt": DerivedField("messages", "\n\n".join(texts[:first])),
        "completion": DerivedField("", "\n\n".join(texts[first:])),
    }
    return cut(whole) | text


@tool("verifiers", "results of verifiers before 0.4", "example_id prompt completion reward", NO_TOKENS, NO_SCORES)
def results(row: Fields) -> RawRollouts:
    """Verifiers 0.1 to 0.3: `results.jsonl` of `vf-eval --save-results`.

    Writer: `states_to_outputs` and `save_outputs` in `verifiers/utils/save_utils.py`. `example_id` names the prompt;
    `prompt` and `completion` are messages, null or an empty list where a rollout had none; `error` is there where it
    failed, whose `reward` is then 0; `is_truncated`, `stop_condition`, `answer`, `metrics`.
    """
    values = row.row
    row.used |= {"example_id"}
    if not values["prompt"]:
        yield None  # it failed before there was one
        return
    yield row.record(
        prompt="prompt",
        completion="completion" if values["completion"] != [] else DerivedField("completion", ""),
        reward="reward",
        answer=DerivedField("answer", values.get("answer")),
        finish_reason=DerivedField("is_truncated", CUT if values.get("is_truncated") else None),
        failure=DerivedField("error", values.get("error") or None),
        group=DerivedField("example_id", values["example_id"]),
    )


@tool(
    *("prime-rl", "token exports of prime-rl", "schema_version step rank env_name export_sequence_idx token_ids "
    "loss_mask advantages inference_logprobs trainer_logprobs"),
    *("rewards", "groups: each row is one", "why a completion ended"),
    unit=lambda row: f"step {row.row['step']}, rank {row.row['rank']}",
)  # fmt: skip
def token_exports(row: Fields) -> RawRollouts:
    """prime-rl 0.8 (commit 559b447): `token_exports/step_N/rank_R.jsonl` of `--enable-token-export`.

    Writer: `TokenExporter` in `src/prime_rl/trainer/rl/token_export.py`. Fields per token: `token_ids`, `position_ids`,
    `loss_mask`, `advantages`, `inference_logprobs`, `trainer_logprobs`, `entropy` and more; per sequence:
    `schema_version`, `step`, `rank`, `micro_step`, `micro_sequence_idx`, `export_sequence_idx`, `env_name`. There are
    no rewards, no groups.
    """
    names = {"tokens": "token_ids", "completion_mask": "loss_mask", "log_probs": "inference_logprobs"}
    values = cut(
        {target: DerivedField(name, row.row[name]) for target, name in (names | {"advantage": "advantages"}).items()}
    )
    if not values["completion_ids"].value:
        yield None
        return
    yield row.record(
        values, policy_version="step", group=DerivedField("one per row", row.number), meta=("env_name", "rank")
    )


# -- open-instruct, SkyRL, NeMo-RL, OpenRLHF, tinker-cookbook, GSM8K ---------------------------------------------------


@tool(
    *("open-instruct", "rollout shards of open-instruct's --save_traces", "step sample_idx prompt_idx prompt_tokens "
    "response_tokens reward advantage finish_reason dataset ground_truth request_info logprobs"),
    "which tokens came from tools: rows that called a tool are excluded from the loss",
)  # fmt: skip
def open_instruct(row: Fields) -> RawRollouts:
    """open-instruct (commit e6c3044): `RUN_rollouts_NNNNNN.jsonl` of `--save_traces`.

    Writer: `_save_rollouts` of `RolloutRecord` in `open_instruct/rl_utils.py`. Fields: `step`, `sample_idx`;
    `prompt_idx`, the group within the step; `prompt_tokens`, `response_tokens`; `reward`, `advantage`; `finish_reason`,
    of vLLM; `dataset`; `ground_truth`, token ids or text; `request_info`, of tools, or null; `logprobs`, per response
    token, or null. Tool output is part of `response_tokens`, and the mask of it is not written: where
    `request_info.tool_calleds` is true, which tokens were sampled is unknown. `--mask_truncated_completions` drops rows
    before `prompt_idx` is counted, so a group whose prompts differ is rejected.
    """
    info, truth = part_of(row.row, "request_info"), row.row["ground_truth"]
    are_ids = isinstance(truth, list) and all(isinstance(item, int) for item in truth)
    failure = "timeout" if info.get("timeouts") else "tool_error" if info.get("tool_errors") else ""
    yield row.record(
        prompt_ids="prompt_tokens",
        completion_ids="response_tokens",
        log_probs="logprobs",
        reward="reward",
        advantage="advantage",
        finish_reason="finish_reason",
        failure=DerivedField("request_info", failure),
        answer=None if are_ids else "ground_truth",
        policy_version="step",
        group=DerivedField("step and prompt_idx", (row.row["step"], row.row["prompt_idx"])),
        flags={"mask_known": not info.get("tool_calleds")},
    )


@tool(
    *("skyrl", "SkyRL's dumps of evaluations", "input_prompt output_response score stop_reason env_class env_extras "
    "data_source"),
    *(NO_TOKENS, "which text came from the environment", NO_SCORES),
    unit=lambda row: _numbered(row, f"{row.row['data_source']}, step", r"global_step_(\d+)"),
)  # fmt: skip
def skyrl(row: Fields) -> RawRollouts:
    """SkyRL 0.3.0 (commit a956457): `dumped_evals/global_step_N_evals/DATASET.jsonl`.

    Writer: `dump_per_dataset_eval_results` in `skyrl/train/utils/trainer_utils.py`. Fields: `input_prompt` and
    `output_response`, the token ids decoded with their special tokens; `score`, the reward, or one per token, whose sum
    it is; `stop_reason`, of the engine; `env_class`, `env_extras`, `data_source`. The response of a multi-turn
    environment contains the environment's text, and the mask is not written: aime, gsm8k and lcb of skyrl-gym 0.4.0 end
    after one response. Rows have no id: a group is the rows of a file with one prompt and one
    ground truth. Without the conversation mode
    SkyRL puts an end token after a response that lacks one.
    """
    score = row.row["score"]
    total = sum(as_reward(part, "score") for part in score) if isinstance(score, list) else score
    yield row.of({**row.row, "score": total}).record(
        prompt="input_prompt",
        completion="output_response",
        reward="score",
        finish_reason="stop_reason",
        policy_version=DerivedField("global_step_N of the folder", or_unknown(row.number_in(r"global_step_(\d+)"))),
        group=DerivedField("input_prompt and env_extras", (str(row.row["input_prompt"]), repr(row.row["env_extras"]))),
        one_turn=row.row["env_class"] in ("aime", "gsm8k", "lcb"),
        flags={"as_chat": False},
    )


_NEMO = "token_ids token_loss_mask input_lengths sample_loss_mask rewards advantages generation_logprobs prev_logprobs"


@tool("nemo-rl", "NeMo-RL's train_data_step*.jsonl", _NEMO, "why a completion ended",
      unit=lambda row: _numbered(row, "step", r"train_data_step(\d+)"))  # fmt: skip
def nemo_rl(row: Fields) -> RawRollouts:
    """NeMo-RL 0.6.0 (commit 7ea279a): `train_data_stepN.jsonl` of GRPO, sync and async, and of PPO.

    Writer: `Logger.log_batched_dict_as_jsonl` in `nemo_rl/utils/logger.py`, called by `nemo_rl/algorithms/grpo.py`,
    `grpo_sync.py` and `ppo.py`. It slices a batch into parts of one, so each field is a list with one item. Fields:
    `token_ids`, padded on the right; `input_lengths`; `token_loss_mask`, 1 for what was generated;
    `generation_logprobs` and `advantages`, per token; `prev_logprobs`; `sample_loss_mask`, 0 for a sample that is kept
    out of the loss (cut off, or masked by its environment); `rewards`; `content`, the texts of the messages; `idx`.
    Under dynamic sampling `rewards` is of the batch before it was filtered, and `filtered_rewards` of the samples in
    the file. Rows have no id: a group is the rows of a step's file with one prompt, by which NeMo-RL itself compares.
    """
    wrapped = isinstance(row.row["input_lengths"], list)
    values = {name: _only_item(name, value) if wrapped else value for name, value in row.row.items()}
    names = {"tokens": "token_ids", "completion_mask": "token_loss_mask"}
    names |= {"log_probs": "generation_logprobs", "advantage": "advantages"}
    whole = {target: DerivedField(name, values[name]) for target, name in names.items()}
    content = values.get("content") or []
    texts = [content] if isinstance(content, str) else [str(text) for text in content]  # the sync trainer: the answer
    learned = as_number(values["sample_loss_mask"], "sample_loss_mask") > 0
    meta = {name: values[name] for name in ("idx", "agent_ref") if name in values}
    step = row.number_in(r"train_data_step(\d+)")
    tokens = cut(whole, length=as_int(values["input_lengths"], "input_lengths"))
    yield row.of(values).record(
        tokens,
        prompt=DerivedField("content", "".join(texts[:-1])),
        completion=DerivedField("content", texts[-1] if texts else ""),
        reward="filtered_rewards" if "filtered_rewards" in values else "rewards",
        policy_version=DerivedField("N-1 of stepN", UNKNOWN_VERSION if step is None else max(step - 1, 0)),
        group=DerivedField("prompt tokens", (step, repr(tokens["prompt_ids"].value))),
        meta=meta | ({} if learned else {"learned": False}),
        flags={"mask_known": learned, "by_prompt": True},
    )


@tool("nemo-rl", "NeMo-RL's val_data_step*.jsonl", "content rewards idx", NO_TOKENS, NO_END, NO_SCORES,
      also=lambda row: len(row) == 3, unit=lambda row: _numbered(row, "step", r"val_data_step(\d+)"))  # fmt: skip
def nemo_rl_validation(row: Fields) -> RawRollouts:
    """NeMo-RL 0.6.0 (commit 7ea279a): `val_data_stepN.jsonl` of its validations.

    Writer: `validate` in `nemo_rl/algorithms/grpo.py`, by `Logger.log_batched_dict_as_jsonl`. Fields: `content`, the
    messages of a conversation, and `rewards`, each in a list of one; `idx`, the row. They are marked as evaluations.
    """
    values = {
        name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in row.row.items()
    }
    talk, step = values["content"], row.number_in(r"val_data_step(\d+)")
    if not is_messages(talk):
        raise DataError(f"field 'content' must be a list of chat messages, got {excerpt(talk)}.")
    first = next((place for place, message in enumerate(talk) if message["role"] == "assistant"), len(talk))
    yield row.of(values).record(
        prompt=DerivedField("content", talk[:first]),
        completion=DerivedField("content", talk[first:]),
        reward="rewards",
        policy_version=DerivedField("N of stepN", or_unknown(step)),
        group=DerivedField("content", (step, repr(talk[:first]))),
        meta=("idx",),
        flags={"evaluation": True},
    )


def _only_item(name: str, value: Any) -> Any:
    """Return the one item of a field, which the writer puts into a list."""
    if name == "idx" or not isinstance(value, list):
        return value
    if len(value) != 1 and name in _NEMO.split():
        raise DataError(
            f"field '{name}' must be a list with one item, as NeMo-RL writes it; it has {len(value)} items."
        )
    return value[0] if len(value) == 1 else None


@tool("openrlhf", "OpenRLHF's generations with rewards", "input output reward", NO_TOKENS, NO_END, NO_SCORES,
      "the policy's version", also=lambda row: len(row) == 3)  # fmt: skip
def openrlhf(row: Fields) -> RawRollouts:
    """OpenRLHF 0.9.6: the generations with rewards of `openrlhf.cli.batch_inference --eval_task rm`.

    Writer: `batch_rm_inference` in `openrlhf/cli/batch_inference.py`, the last one: 0.9.7 removed it, and OpenRLHF 0.11
    writes no rollouts to files. Fields: `input`, the prompt as sampled from, template applied; `output`, of one
    turn; `reward`, of the reward model. Best-of-N samples are not in turn (`prompts * N`, then by rank): a group is the
    rows of a file with one prompt.
    """
    group = DerivedField("input", str(row.row["input"]))
    yield row.record(prompt="input", completion="output", reward="reward", group=group, flags={"as_chat": False})


@tool("tinker", "captured samples of tinker-cookbook, with its rollout summaries", "scope",
      "rewards, unless the rollout summaries are also given", also=lambda row: _is_call(row))  # fmt: skip
def tinker(row: Fields) -> RawRollouts:
    """tinker-cookbook 0.6.1 (commit 9dfcc3a): `capture/sample.jsonl`, with rollout summaries for the rewards.

    Writers: `tinker_cookbook/capture/instrument.py`, whose rows of kind `sample` have `prompt_tokens` (not where a
    prompt has images), `status` (`ok`, `error`, `cancelled`, or `submitted` if the end was not reported), and of
    status `ok` `samples` (of each `tokens`, `logprobs`, `stop_reason`); `created_at` and `scope` (`split`, `iteration`,
    `group_idx`, `traj_idx`, `purpose`); and `tinker_cookbook/rl/rollout_logging.py`, whose summaries have
    `total_reward` and `sampling_client_step`, the version, under the same keys. A call is one trajectory: the turns of
    an episode are rows of one group. A sample that names no split gets a reward only where all splits agree on one. A
    split other than `train` is an evaluation, and so is the purpose `eval`.
    """
    values = row.row
    if values.get("status", "ok") != "ok":
        yield None
        return
    if "prompt_tokens" not in values:
        raise DataError("there are no prompt_tokens: the prompt contains images, so its tokens are not in the file.")
    scope = part_of(values, "scope")
    split, iteration, group, traj = (scope.get(name) for name in ("split", "iteration", "group_idx", "traj_idx"))
    for place, sample in enumerate(as_list(values["samples"], "samples")):
        summaries = row.beside.get((iteration, group, place if traj is None else traj), {})
        candidates = (
            {summaries[split]} if split in summaries else {*summaries.values()} if split is None else set[_Summary]()
        )
        summary = candidates.pop() if len(candidates) == 1 else _Summary(None, None)
        version = iteration if summary.step is None else summary.step
        yield row.record(
            prompt_ids="prompt_tokens",
            completion_ids=DerivedField("samples[].tokens", sample["tokens"]),
            log_probs=DerivedField("samples[].logprobs", sample.get("logprobs")),
            finish_reason=DerivedField("samples[].stop_reason", sample.get("stop_reason")),
            reward=DerivedField(f"total_reward of {sum(map(len, row.beside.values())):,} summaries", summary.reward),
            policy_version=DerivedField("sampling_client_step or scope.iteration", or_unknown(version)),
            temperature=DerivedField(
                "sampling_params.temperature", part_of(values, "sampling_params").get("temperature")
            ),
            created_at=DerivedField("created_at", values.get("created_at")),
            group=DerivedField(
                "iteration and group_idx", ("row", row.number) if group is None else (split, iteration, group)
            ),
            meta={"scope": scope, "model_path": values.get("model_path")},
            flags={
                "one_prompt": False,
                "evaluation": split not in (None, "train") or scope.get("purpose") == "eval",
            },
        )


def _is_call(row: Row) -> bool:
    """Return True for a captured call, also for one that failed, which has no samples."""
    return row.get("kind") == "sample" or {"prompt_tokens", "samples"} <= row.keys()


class _Summary(NamedTuple):
    """The fields that a rollout summary of tinker records about a trajectory."""

    reward: float | None
    step: int | None


def is_summary(row: Row) -> bool:
    """Return True for a rollout summary of tinker: rewards, and no tokens."""
    return {"total_reward", "group_idx", "traj_idx"} <= row.keys()


def add_summary(beside: dict[Any, dict[Any, Any]], row: Row) -> None:
    """Take the reward and the version of a trajectory from its rollout summary."""
    key, step = tuple(row.get(name) for name in ("iteration", "group_idx", "traj_idx")), row.get("sampling_client_step")
    summary = _Summary(as_reward(row["total_reward"], "total_reward"), None if step is None else as_int(step, "step"))
    beside.setdefault(key, {})[row.get("split")] = summary


def is_metadata(row: Row) -> bool:
    """Return True for a row of a file without rollouts that a tool writes beside them.

    The settings beside open-instruct's shards; the indexes of prime-rl's stream of episodes and of its annotations.
    """
    index = {"chunk", "offset"} <= row.keys() and not row.keys().isdisjoint(("trace_id", "trace_ids"))
    return index or row.keys() == {"run_name", "git_commit", "model_name", "timestamp"}


def _is_solution(value: Any) -> bool:
    return isinstance(value, dict) and "is_correct" in value and "solution" in value


@tool("gsm8k-solutions", "graded solutions in the form of GSM8K's example_model_solutions.jsonl",
      "question ground_truth", NO_TOKENS, NO_END, NO_SCORES,
      also=lambda row: any(_is_solution(value) for value in row.values()))  # fmt: skip
def gsm8k_solutions(row: Fields) -> RawRollouts:
    """GSM8K's `example_model_solutions.jsonl`: four graded solutions of a question.

    Fields: `question`, `ground_truth`, and one object per model with `solution` and `is_correct`. A row is one group.
    """
    for model, value in row.row.items():
        if _is_solution(value):
            group, each = DerivedField("one per line", row.number), row.of({**row.row, **value})
            names = {"prompt": "question", "answer": "ground_truth", "completion": "solution", "reward": "is_correct"}
            yield each.record(names, group=group, meta={"model": model})


# -- tables of Weights & Biases ----------------------------------------------------------------------------------------

_NUMBERED = re.compile(r"(input|output|score)_(\d+)")


def _rows_of_table(row: Fields) -> Iterator[Fields]:
    """Yield the rows of a table as fields by name; of verl's wide table, each sample by itself."""
    columns = [str(name) for name in as_list(row.row["columns"], "columns")]
    for number, values in enumerate(as_list(row.row["data"], "data")):
        if not isinstance(values, list) or len(values) != len(columns):
            raise DataError(f"data[{number}] must be a list of {len(columns)} values, got {excerpt(values)}.")
        by_name = dict(zip(columns, values, strict=True))
        samples: dict[str, dict[str, Any]] = {}
        for name in columns:
            if part := _NUMBERED.fullmatch(name):
                samples.setdefault(part[2], {})[part[1]] = by_name[name]
        if samples and columns[0] == "step" and len(columns) == 1 + 3 * len(samples):
            validation = [{**sample, "step": by_name["step"], "evaluation": True} for sample in samples.values()]
        else:
            validation = None
        for each in [by_name] if validation is None else validation:
            part_fields = row.of(each)
            part_fields.number = number
            yield part_fields


def _table_tool(row: Row) -> Tool:
    tool = find_tool("auto", row)
    return ROWS if tool is None or tool.read is wandb_table else tool


def _first_row_of_table(row: Fields) -> Mapping[str, str]:
    first = next(_rows_of_table(row), None)
    return {} if first is None else _table_tool(first.row).first_row_tells(first)


@tool(
    *("wandb", "tables of Weights & Biases", "columns data", "values that the writer's table lacks"),
    also=lambda row: isinstance(row["columns"], list) and isinstance(row["data"], list),
    first_row_tells=_first_row_of_table,
)
def wandb_table(row: Fields) -> RawRollouts:
    """W&B: `media/table/NAME_STEP_DIGEST.table.json`, as a run's folder `files` and its artifacts hold them.

    Writer: `Table._to_table_json` in `wandb/sdk/data_types/table.py` (wandb 0.31.0): `columns`, the names, and `data`,
    a list of values per row; a file is one document. A row is read as its tool's: TRL's `completions` has the columns
    of its Parquet tables. `val/generations` of verl (`ValidationGenerationsLogger` in `verl/utils/tracking.py`) has
    `step`, and `input_N`, `output_N`, `score_N` of each sample; all are evaluations. Any other table is plain rows. A
    table that is logged again with more rows adds those.
    """
    for fields in _rows_of_table(row):
        values = fields.row
        if values.keys() == {"input", "output", "score", "step", "evaluation"}:
            step = as_int(values["step"], "step")
            yield fields.record(
                prompt="input",
                completion="output",
                reward="score",
                policy_version=DerivedField("step", step),
                group=DerivedField("step and input", (step, str(values["input"]))),
                one_turn=False,
                flags={"as_chat": False, "evaluation": True},
            )
        else:
            yield from _table_tool(values).read(fields)
        row.about |= fields.about


# -- files of no tool's ------------------------------------------------------------------------------------------------

_OF_THE_PROMPT = ("prompt", "answer", "policy_version", "created_at")
_PAIRS = (("prompt_ids", "completion_ids"), ("prompt", "completion"))


def rows(row: Fields) -> RawRollouts:
    """Files of no tool's: rows whose fields have the names of a record's, or that `--field` names.

    A row is one completion, or the completions of one prompt: then `completion` or `completion_ids` is a list of them,
    and so is each field of theirs. `messages` are a prompt and a completion in one: the last message is the completion.
    `group`, `group_id` or `uid` names the group; else rows of a `step` with one prompt are one. A row with an `error`
    and the like has failed.
    """
    names = {target: target for target in VALUES if target in row.row}
    names = {target: path for target, path in {**names, **row.field_paths}.items() if path != NONE}
    if MESSAGES not in row.field_paths and ({"prompt", "prompt_ids"} & names.keys() or MESSAGES not in row.row):
        talk = None
    else:
        talk = row.value(row.field_paths.get(MESSAGES, MESSAGES))
    names.pop(MESSAGES, None)
    lacks = [] if "reward" in names or row.field_paths.get("reward") == NONE or row.for_display else ["reward"]
    if talk is None and not any(a in names and b in names for a, b in (*_PAIRS, ("prompt", "completion_ids"))):
        lacks = [target for target in _PAIRS[1] if target not in names] + lacks
    if lacks:
        raise DefinitionError(
            f"there is no field for {' or '.join(lacks)}. {row.describe_row()} Specify the field: --field "
            f"{lacks[0]}=NAME (a dotted path selects a nested field; `none` omits the value)"
        )
    if talk is not None:
        yield _conversation(row, talk, names)
        return
    several = row.value(names.get("completion_ids", names.get("completion", "")))
    single = several == [] and not isinstance(row.row.get(names.get("reward", "")), list)
    are_ids = isinstance(several, list) and any(isinstance(item, int) for item in several[:1])
    if not isinstance(several, list) or is_messages(several) or single or are_ids:
        group = _group_of(row, row.row.get(names.get("prompt_ids", names.get("prompt", ""))))
        yield row.record(names, group=group, flags={"across_files": group is not None})
        return
    values = {target: row.value(path) for target, path in names.items() if "+" not in path and "*" not in path}
    if "reward" in names and "reward" not in values:
        raise DataError("a sum of rewards cannot be read from lists of rewards. Choose one: --field reward=NAME")
    meta = row.meta()
    for place in range(len(several)):
        each = {target: _part(names[target], target, value, place, len(several)) for target, value in values.items()}
        part = row.of({**{name: value for name, value in row.row.items() if not isinstance(value, list)}, **each})
        part.field_paths = {}
        group = DerivedField("one per row", (row.number, str(each.get("prompt_ids", each.get("prompt")))))
        yield part.record({target: target for target in each if each[target] is not None}, group=group, meta=meta)


_GROUPS = ("group", "group_id", "uid")
_STEPS = ("step", "global_step", "iteration")


def _group_of(row: Fields, prompt: Any) -> DerivedField | None:
    """Return the group that a row of no tool's names, or the step that its prompt is of."""
    version = row.row.get("policy_version")
    for name in _GROUPS:
        value = row.row.get(name)
        if value is not None and value == value:  # NaN, as data frames write a missing number
            return DerivedField(name, (version, str(value)))
    for name in _STEPS:
        value = row.row.get(name)
        if value is not None and value == value:
            return DerivedField(f"{name} and prompt", (version, str(value), repr(prompt)))
    return None


def _conversation(row: Fields, talk: Any, names: Mapping[str, str]) -> RawRollout:
    """Return the record of messages: the last is the completion, and those before it the prompt.

    An assistant's message among those before may be the policy's own: the file does not record it.
    """
    if not is_messages(talk) or talk[-1].get("role") != "assistant" or len(talk) < 2:
        raise DataError(
            f"field '{MESSAGES}' must be a list of chat messages that ends with one from the assistant, got "
            f"{excerpt(talk)}."
        )
    first = next(place for place, message in enumerate(talk) if message.get("role") == "assistant")
    start = first if row.for_display else len(talk) - 1
    return row.record(
        {target: path for target, path in names.items() if target not in ("prompt", "completion")},
        prompt=DerivedField("messages", talk[:start]),
        completion=DerivedField("the last of messages", talk[start:]),
        group=_group_of(row, talk[:-1]),
        one_turn=first == len(talk) - 1,
    )


def _part(name: str, target: str, value: Any, place: int, num: int) -> Any:
    """Return the value of one of a row's completions."""
    shared = target in ("prompt_ids", "completion_mask") and isinstance(value, list) and not isinstance(value[0], list)
    if target in _OF_THE_PROMPT or shared or value is None:
        return value
    if not isinstance(value, list):
        raise DataError(f"field '{name}' must be a list of {num} items, one per completion, got {excerpt(value)}.")
    if len(value) != num:
        raise DataError(
            f"field '{name}' has length {len(value)}; it must have one item per completion, {num} in total."
        )
    return value[place]


# -- which tool --------------------------------------------------------------------------------------------------------

TOOLS: tuple[Tool, ...] = tuple(REGISTERED)
ROWS = Tool(name="rows", summary="rows with a prompt, a completion and a reward", signature=frozenset(), read=rows)
NAMES: tuple[str, ...] = ("auto", "jsonl", "rows", *dict.fromkeys(tool.name for tool in TOOLS), "store")
"""The values of `--format`; `jsonl` is `rows` for a file whose name does not identify a tool; `store` is the output of
`export`.
"""


def is_store_row(row: Row) -> bool:
    """Return True for a row that `rlhf-pipeline export` wrote."""
    return "input_ids" in row and any(name in row for name in ("assistant_mask", "num_prompt_tokens", "trajectory_id"))


def check_format(name: str) -> None:
    """Raise a DefinitionError where `--format` does not take a name."""
    if name not in NAMES:
        raise DefinitionError(f"there is no format '{name}'." + did_you_mean(name, NAMES))


def find_tool(name: str, row: Row, *, is_export: bool = False) -> Tool | None:
    """Return the tool of a file from its first row; None for rows that `export` wrote, or where `is_export` is true.

    >>> find_tool("auto", {"prompt": "1+1=", "completion": "2", "reward": 1.0}).name
    'rows'
    """
    check_format(name)
    if name == "store" or (name == "auto" and (is_export or is_store_row(row))):
        return None
    recognised = next((tool for tool in TOOLS if tool.matches(row)), ROWS)
    if name in ("jsonl", "rows"):
        return ROWS
    if name in ("auto", recognised.name):
        return recognised
    candidates = [tool for tool in TOOLS if tool.name == name]
    lacking = min((tool.signature - row.keys() for tool in candidates), key=len)
    raise DefinitionError(
        f"the file is not in the format of {' or '.join(tool.summary for tool in candidates)}: its rows lack "
        f"required fields ({', '.join(sorted(lacking))}). Its format appears to be {recognised.name}: use --format "
        f"{recognised.name}."
    )
