"""The formats that `import` reads: one table of what each tool calls its fields, and how a file is recognised."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError, did_you_mean
from rlhf_pipeline.exchange._completion import (
    Row,
    as_advantage,
    as_ids,
    as_list,
    as_mask,
    as_reward,
    message_text,
    shown,
)
from rlhf_pipeline.exchange._reader import ALIASES, ONE_ROW, Format
from rlhf_pipeline.exchange._tables import Container

_NOTHING: Mapping[str, None] = dict.fromkeys(ALIASES)
"""Every target, of which nothing is known."""


def _of(row: Any, name: str) -> Any:
    """Return a field that must be there."""
    if not isinstance(row, Mapping) or name not in row:
        there = ", ".join(sorted(map(str, row))) if isinstance(row, Mapping) else shown(row)
        raise DataError(f"there is no field '{name}' (here are: {there}).")
    return row[name]


def _part(row: Any, name: str) -> Mapping[str, Any]:
    """Return a field that holds fields itself; empty if it is not there."""
    found = row.get(name) if isinstance(row, Mapping) else row
    if not isinstance(found, Mapping | None):
        raise DataError(f"field '{name}' must hold fields by name, got {shown(found)}.")
    return found or {}


# -- graded solutions of GSM8K: a row is one group; the reward is 1 where a solution is correct ------------------------


def _is_solution(value: Any) -> bool:
    return isinstance(value, dict) and "is_correct" in value and "solution" in value


def _solutions(row: Row) -> Iterator[Row]:
    made = {name: value for name, value in row.items() if _is_solution(value)}
    if not made:
        raise DataError("no field holds a solution: an object with 'is_correct' and 'solution'.")
    shared = {"prompt": _of(row, "question"), "answer": row.get("ground_truth"), "group": ONE_ROW}
    for name, value in made.items():
        graded = {"completion": value["solution"], "reward": value["is_correct"], "model": name}
        yield {**_NOTHING, **shared, **graded}


# -- prime-rl's episodes and verifiers' traces -------------------------------------------------------------------------


def _episode(row: Row) -> Iterator[Row | None]:
    """Yield the trajectories of an episode: each path from a root to a leaf of a trace's message graph.

    The reward is the sum of score times weight. Traces that failed (`ok` false), that belong to an agent that is not
    trained, or that have no sampled tokens are left out. A row that is a trace by itself, as verifiers saves them, is
    an episode of one; its group is its task.
    """
    if "nodes" in row:
        task = json.dumps(row.get("task"), sort_keys=True, default=str)
        row = {"traces": [row], "group": {"id": task}, "env": {"id": row.get("env_id")}}
    work, env = _part(_part(row, "run"), "work"), _part(row, "env")
    for trace in as_list(_of(row, "traces"), "traces"):
        agent = _part(trace, "agent")
        if not trace.get("ok") or not agent.get("trainable", True):
            yield None
            continue
        calls = [call for call in trace.get("calls") or [] if call.get("finish_reason")]
        rewards = [reward for reward in _part(trace, "rewards").values() if reward is not None]
        for path in _paths(_of(trace, "nodes")):
            yield {
                **_NOTHING,
                **_branch(path),
                "reward": sum(map(_weighed, rewards)) if rewards else math.nan,
                "group": _part(row, "group").get("id", ONE_ROW),
                "policy_version": _part(work, "policy").get("start", work.get("step", 0)),
                "finish_reason": calls[-1]["finish_reason"] if calls else None,
                "answer": _part(_part(trace, "task"), "data").get("answer"),
                "env": env.get("name") or env.get("id"),
                "agent": agent.get("name"),
                "trace": trace.get("id"),
                "stop_condition": trace.get("stop_condition"),
            }


def _weighed(item: Any) -> float:
    return as_reward(_of(item, "score"), "score") * as_reward(item.get("weight", 1.0), "weight")


def _paths(nodes: Any) -> Iterator[list[Row]]:
    """Yield each path from a root to a leaf of a message graph."""
    graph = as_list(nodes, "nodes")
    parents = {node.get("parent") for node in graph}
    for leaf in range(len(graph)):
        path: list[Row] = []
        place: int | None = None if leaf in parents else leaf
        while place is not None:
            if not 0 <= place < len(graph) or len(path) > len(graph):
                raise DataError(f"the nodes do not form a tree: {json.dumps([n.get('parent') for n in graph])[:80]}")
            path.append(graph[place])
            place = graph[place].get("parent")
        if path:
            yield path[::-1]


def _branch(path: Sequence[Row]) -> dict[str, Any]:
    """Return the tokens of a path of messages, with their values, and its text."""
    made: dict[str, list[Any]] = {"tokens": [], "completion_mask": [], "log_probs": [], "ref_log_probs": []}
    for node in path:
        ids, mask = as_ids(node.get("token_ids") or [], "token_ids"), as_mask(node.get("mask") or [], "mask")
        if len(mask) != len(ids):
            raise DataError(f"a node has {len(ids)} token_ids and {len(mask)} in its mask.")
        made["tokens"] += ids
        made["completion_mask"] += mask
        for target, name in (("log_probs", "logprobs"), ("ref_log_probs", "reference_logprobs")):
            scores = as_list(node.get(name) or [], name)  # of the sampled tokens only, or none at all
            if len(scores) not in (0, sum(mask)):
                raise DataError(f"a node has {sum(mask)} sampled tokens and {len(scores)} {name}.")
            values = iter(scores)
            made[target] += [next(values, None) if on else None for on in mask]
    said = [message_text(_part(node, "message")) for node in path]
    first = next((i for i, node in enumerate(path) if any(node.get("mask") or [])), len(path))
    return {
        **made,
        "ref_log_probs": made["ref_log_probs"] if any(v is not None for v in made["ref_log_probs"]) else None,
        "advantage": as_advantage([v for node in path for v in node.get("advantages") or []], "advantages"),
        "prompt": "\n\n".join(said[:first]),
        "completion": "\n\n".join(said[first:]),
    }


# -- tinker-cookbook: records of samples, and summaries of rollouts with their rewards ---------------------------------

Rewards = dict[tuple[Any, ...], dict[Any, float]]
"""By iteration, group and trajectory: the reward in each split."""


def is_tinker_summary(row: Row) -> bool:
    """Return True for a rollout summary of tinker-cookbook: rewards, and no tokens."""
    return all(name in row for name in ("total_reward", "group_idx", "traj_idx"))


def tinker_reward(rewards: Rewards, row: Row) -> None:
    """Take the reward of a trajectory from its rollout summary."""
    key = tuple(row.get(name) for name in ("iteration", "group_idx", "traj_idx"))
    rewards.setdefault(key, {})[row.get("split")] = as_reward(_of(row, "total_reward"), "total_reward")


def tinker_samples(rewards: Rewards, row: Row) -> Iterator[Row | None]:
    """Yield the samples of one call; a call is one trajectory: the turns of an episode are rows of one group.

    A sample that does not name its split gets a reward only where all splits agree on one.
    """
    if row.get("kind", "sample") != "sample" or row.get("status") == "error":
        yield None
        return
    scope = _part(row, "scope")
    split, iteration, group, traj = (scope.get(name) for name in ("split", "iteration", "group_idx", "traj_idx"))
    for i, sample in enumerate(as_list(_of(row, "samples"), "samples")):
        known = rewards.get((iteration, group, i if traj is None else traj), {})
        values = {known[split]} if split in known else {*known.values()} if split is None else set[float]()
        yield {
            **_NOTHING,
            "prompt_ids": _of(row, "prompt_tokens"),
            "completion_ids": _of(sample, "tokens"),
            "log_probs": sample.get("logprobs"),
            "reward": values.pop() if len(values) == 1 else None,
            "group": ONE_ROW if group is None else (split, iteration, group),
            "policy_version": iteration or 0,
            "finish_reason": sample.get("stop_reason"),
            "created_at": row.get("created_at"),
            "scope": scope,
            "model_path": row.get("model_path"),
        }


def _is_tinker(row: Row) -> bool:
    return ("prompt_tokens" in row and "samples" in row) or row.get("kind") == "sample" or is_tinker_summary(row)


# -- the table ---------------------------------------------------------------------------------------------------------


def _is_batch(row: Row) -> bool:
    tokens = [row[name] for name in ("prompt_token_ids", "response_ids")]
    return all(isinstance(rows, list) and rows and isinstance(rows[0], list) for rows in tokens)


def is_store_row(row: Row) -> bool:
    """Return True for a row that `rlhf-pipeline export` wrote."""
    return "input_ids" in row and any(name in row for name in ("assistant_mask", "num_prompt_tokens", "trajectory_id"))


FORMATS: tuple[Format, ...] = (
    Format(
        name="gsm8k-solutions",
        summary="graded solutions in the form of GSM8K's example_model_solutions.jsonl",
        also=lambda row: any(_is_solution(value) for value in row.values()),
        parts=_solutions,
        about="prompt=question, answer=ground_truth, completion=*.solution, reward=*.is_correct, one group per line",
    ),
    *(
        # prime-rl 559b447 FileMonitor.log_episodes; verifiers a60a606 Episode.to_record
        Format(
            name="prime-rl",
            summary="episodes of prime-rl (traces.jsonl), or traces of verifiers",
            needs=needs,
            parts=_episode,
            about="episodes: group=group.id, policy_version=run.work.policy.start, reward=sum of traces[].rewards",
        )
        for needs in ("traces task", "nodes rewards")
    ),
    Format(  # prime-rl 559b447 trainer/rl/token_export.py TokenExporter
        name="prime-rl",
        summary="token exports of prime-rl",
        needs="token_ids loss_mask inference_logprobs",
        fields="tokens=token_ids completion_mask=loss_mask log_probs=inference_logprobs advantage=advantages "
        "policy_version=step reward=",
        meta=("env_name", "rank"),
        alone=True,
    ),
    Format(  # verifiers, results.jsonl
        name="verifiers",
        summary="results of verifiers' evaluations",
        needs="example_id prompt completion reward",
        fields="reward=reward group=",
        group_of=("example_id",),
    ),
    Format(  # tinker-cookbook 9dfcc3a capture/instrument.py, rl/rollout_logging.py
        name="tinker",
        summary="captured samples of tinker-cookbook, with its rollout summaries",
        also=_is_tinker,
        parts=partial(tinker_samples, {}),
        about="samples: prompt_ids=prompt_tokens, completion_ids=samples[].tokens, group=iteration+group_idx",
    ),
    *(
        # open-instruct e6c3044 open_instruct/rl_utils.py RolloutRecord. The mask of tool output is not in the file, so
        # all response tokens count as the policy's. An answer in token ids is no text, and stays in `meta`.
        Format(
            name="open-instruct",
            summary="rollout shards of open-instruct's --save_traces",
            needs="prompt_tokens response_tokens reward",
            also=lambda row, kind=kind: isinstance(row.get("ground_truth"), kind),
            fields="prompt_ids=prompt_tokens completion_ids=response_tokens reward=reward log_probs=logprobs "
            f"policy_version=step group= answer={answer}",
            group_of=("step", "prompt_idx"),
        )
        for kind, answer in ((list, ""), (object, "ground_truth"))
    ),
    Format(  # NeMo-RL 7ea279a nemo_rl/algorithms/grpo.py, log_batched_dict_as_jsonl
        name="nemo-rl",
        summary="NeMo-RL's train_data_step*.jsonl",
        needs="token_ids token_loss_mask rewards",
        fields="tokens=token_ids length=input_lengths completion_mask=token_loss_mask log_probs=generation_logprobs "
        "reward=rewards advantage=advantages counts=sample_loss_mask texts=content",
        meta=("idx", "agent_ref"),
        version_in_path=r"train_data_step(\d+)",
        version_offset=-1,
    ),
    Format(  # SkyRL a956457 dump_per_dataset_eval_results
        name="skyrl",
        summary="SkyRL's dumps of evaluations",
        needs="input_prompt output_response score",
        fields="prompt=input_prompt completion=output_response reward=score finish_reason=stop_reason",
        as_chat=False,
        per_token=True,
        version_in_path=r"global_step_(\d+)",
    ),
    Format(  # SkyRL a956457 generators/base.py GeneratorOutput; what is left is of the whole batch
        name="skyrl",
        summary="batches of SkyRL's generator",
        needs="prompt_token_ids response_ids rewards",
        also=_is_batch,
        fields="prompt_ids=prompt_token_ids completion_ids=response_ids reward=rewards completion_mask=loss_masks "
        "log_probs=rollout_logprobs finish_reason=stop_reasons group=trajectory_ids",
        meta=(),
        per_token=True,
        version_in_path=r"global_step_(\d+)",
    ),
    *(
        # TRL 1.16 GRPOTrainer.log calls columns of rewards after their functions; before 0.18 `reward` is the total and
        # `step` is text. The instances of one prompt have no name; their place in the table tells them apart. Each log
        # writes the last generation, also where several steps are taken on it.
        Format(
            name="trl",
            summary="the completions table of TRL's trainers",
            needs="step prompt completion",
            also=also,
            fields="prompt=prompt completion=completion reward=reward advantage=advantage policy_version=step group= "
            "answer=",
            version_offset=-1,
            own_rewards=own,
            as_chat=False,
            repeated_but="step",
        )
        for own, also in (
            (True, lambda row: "advantage" in row or (isinstance(row["step"], str) and "reward" not in row)),
            (False, lambda row: isinstance(row["step"], str)),
        )
    ),
    Format(  # verl 1dda039 RayPPOTrainer._dump_generations: the whole prompt as text; a step's rows in any order
        name="verl",
        summary="verl's rollout_data_dir dumps",
        needs="input output score step",
        fields="prompt=input completion=output reward=score answer=gts policy_version=step group=uid",
        version_offset=-1,
        group_of=("step", "input"),
        as_chat=False,
    ),
    Format(  # OpenRLHF cli/batch_inference.py
        name="openrlhf",
        summary="OpenRLHF's generations with rewards",
        needs="input output reward",
        fields="prompt=input completion=output reward=reward",
        as_chat=False,
    ),
    Format(name="groups", summary="prompts, completions and rewards by their field names"),
)
"""In the order in which they are tried; the last takes any row that has a prompt, a completion and a reward."""

CONTAINERS: tuple[Container, ...] = ("jsonl", "parquet", "hf")
NAMES: tuple[str, ...] = ("auto", *CONTAINERS, *dict.fromkeys(item.name for item in FORMATS[:-1]), "store")
"""What `--format` takes: a container name reads `groups` by field names; `store` is what `export` writes."""


def check_format(name: str) -> None:
    """Raise a DefinitionError where `--format` does not take a name."""
    if name not in NAMES:
        raise DefinitionError(f"there is no format '{name}'." + did_you_mean(name, NAMES))


def find_format(name: str, row: Row, *, is_export: bool = False) -> Format | None:
    """Return the format of a file from its first row; None for rows that `export` wrote, or where `is_export` says so.

    >>> find_format("auto", {"input": "1+1=", "output": "2", "score": 1.0, "step": 3}).name
    'verl'
    """
    check_format(name)
    if name == "store" or (name in ("auto", *CONTAINERS) and (is_export or is_store_row(row))):
        return None
    if name == "auto":
        return next(item for item in FORMATS if item.matches(row))
    if name in CONTAINERS:
        return FORMATS[-1]
    named = [item for item in FORMATS if item.name == name]
    found = next((item for item in named if item.matches(row)), None)
    if found is None:
        looks = next(item for item in FORMATS if item.matches(row))
        summaries = " or ".join(dict.fromkeys(item.summary for item in named))
        raise DefinitionError(
            f"this is not {summaries}. It has the fields {', '.join(sorted(map(str, row)))} and looks like "
            f"--format {looks.name if looks is not FORMATS[-1] else 'jsonl'}."
        )
    return found
