"""Formats with a structure of their own: GSM8K's solutions, prime-rl, tinker-cookbook, NeMo-RL, SkyRL's batches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange._rollout import (
    ONE_ROW,
    Rollout,
    as_answer,
    as_ids,
    as_int,
    as_list,
    as_number,
    as_reward,
    as_scores,
    as_text,
    message_text,
    shown,
)

Row = Mapping[str, Any]


class SolutionsReader:
    """Graded solutions in the form of GSM8K's `example_model_solutions.jsonl`.

    Source: the file itself (openai/grade-school-math): question, ground_truth, and one object per model with
    `is_correct` and `solution`. A row is one group; the reward is 1.0 where the solution is correct.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: object = None) -> None:
        _only(given, "prompt", "answer")
        self.question = given.get("prompt", "question")
        self.answer = given.get("answer", "ground_truth")

    def about(self) -> str:
        """Describe which field was read as what."""
        return (
            f"prompt={self.question}, answer={self.answer}, completion=*.solution, reward=*.is_correct, "
            "one group per line"
        )

    def read(self, row: Row) -> list[Rollout]:
        """Return the solutions of one question.

        Raises:
            DataError: the question or a solution is not what it must be.
        """
        prompt = as_text(field_of(row, self.question), self.question)
        answer = as_answer(row.get(self.answer))
        made = [
            Rollout(
                prompt=prompt,
                completion=as_text(value["solution"], f"{name}.solution"),
                reward=as_reward(value["is_correct"], f"{name}.is_correct"),
                answer=answer,
                group=ONE_ROW,
                meta={"model": name},
            )
            for name, value in row.items()
            if is_solution(value)
        ]
        if not made:
            raise DataError("no field holds a solution: an object with 'is_correct' and 'solution'.")
        return made


def is_solution(value: Any) -> bool:
    """Return True for a graded solution."""
    return isinstance(value, dict) and "is_correct" in value and "solution" in value


class PrimeRLReader:
    """prime-rl's files of episodes, `rollouts/step_N/train/{all,effective}/traces.jsonl`, and its token exports.

    Sources: `FileMonitor.log_episodes` (prime-rl 559b447), which writes `verifiers.v1.Episode.to_record` (a60a606): a
    `group.id`, the `run.work.policy.start` version, and `traces` of `nodes` with token_ids, mask and logprobs. Each
    path from the root to a leaf is one trajectory; the reward is the sum of score times weight. Traces that failed
    (`ok` false), that belong to an agent that is not trained, or that have no sampled tokens are left out. A row that
    is a trace by itself, as verifiers saves them, is an episode of one; its group is its task. And `TokenExporter`
    (`trainer/rl/token_export.py`): token_ids, loss_mask, inference_logprobs, advantages per sequence; these files have
    no rewards and no groups.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: object = None) -> None:
        _only(given)
        self.is_export = "token_ids" in row
        self.left_out = 0

    def about(self) -> str:
        """Describe which field was read as what."""
        if self.is_export:
            return (
                "token export: tokens=token_ids, log_probs=inference_logprobs, advantage=advantages; it has no rewards"
            )
        return "episodes: group=group.id, policy_version=run.work.policy.start, reward=sum of traces[].rewards"

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one episode, or of one exported sequence.

        Raises:
            DataError: a field is missing or of a wrong kind.
        """
        if self.is_export:
            return self._exported(row)
        if "nodes" in row:
            task = json.dumps(row.get("task"), sort_keys=True, default=str)
            row = {"traces": [row], "group": {"id": task}, "env": {"id": row.get("env_id")}}
        work = (row.get("run") or {}).get("work") or {}
        version = (work.get("policy") or {}).get("start", work.get("step", 0))
        group = (row.get("group") or {}).get("id", ONE_ROW)
        made: list[Rollout] = []
        for trace in as_list(field_of(row, "traces"), "traces"):
            agent = trace.get("agent") or {}
            if not trace.get("ok") or not agent.get("trainable", True):
                self.left_out += 1
                continue
            branches = [self._branch(trace, leaf) for leaf in _leaves(field_of(trace, "nodes"))]
            kept = [branch for branch in branches if branch is not None]
            self.left_out += not kept
            for branch in kept:
                branch.group = group
                branch.policy_version = as_int(version, "run.work.policy.start")
                branch.meta = {
                    "env": (row.get("env") or {}).get("name") or (row.get("env") or {}).get("id"),
                    "agent": agent.get("name"),
                    "trace": trace.get("id"),
                    "stop_condition": trace.get("stop_condition"),
                }
                made.append(branch)
        return made

    def _branch(self, trace: Row, path: Sequence[Row]) -> Rollout | None:
        tokens: list[int] = []
        mask: list[bool] = []
        scores: list[float | None] = []
        ref: list[float | None] = []
        for node in path:
            ids, sampled = as_ids(node.get("token_ids") or [], "token_ids"), list(node.get("mask") or [])
            if len(sampled) != len(ids):
                raise DataError(f"a node has {len(ids)} token_ids and {len(sampled)} in its mask.")
            tokens += ids
            mask += [bool(item) for item in sampled]
            scores += _spread(as_scores(node.get("logprobs") or [], "logprobs"), sampled, "logprobs")
            ref += _spread(as_scores(node.get("reference_logprobs") or [], "reference_logprobs"), sampled, "reference")
        if not any(mask):
            return None
        start = mask.index(True)
        said = [message_text(node.get("message") or {}) for node in path]
        first = next((i for i, node in enumerate(path) if any(node.get("mask") or [])), len(path))
        calls = [call for call in trace.get("calls") or [] if call.get("finish_reason")]
        credit = next((node["advantages"][0] for node in path if node.get("advantages")), None)
        values = [reward for reward in (trace.get("rewards") or {}).values() if reward is not None]
        return Rollout(
            prompt="\n\n".join(said[:first]),
            completion="\n\n".join(said[first:]),
            prompt_ids=tokens[:start],
            completion_ids=tokens[start:],
            completion_mask=mask[start:],
            log_probs=scores[start:],
            ref_log_probs=None if all(item is None for item in ref) else ref[start:],
            reward=as_reward(sum(map(_weighed, values)), "rewards") if values else math.nan,
            advantage=math.nan if credit is None else as_reward(credit, "advantages"),
            finish_reason=str(calls[-1]["finish_reason"]) if calls else "",
            answer=as_answer(((trace.get("task") or {}).get("data") or {}).get("answer")),
        )

    def _exported(self, row: Row) -> list[Rollout]:
        ids = as_ids(field_of(row, "token_ids"), "token_ids")
        mask = [bool(item) for item in as_list(field_of(row, "loss_mask"), "loss_mask")]
        scores = as_scores(field_of(row, "inference_logprobs"), "inference_logprobs")
        if not len(ids) == len(mask) == len(scores):
            raise DataError(f"{len(ids)} token_ids, {len(mask)} in loss_mask, {len(scores)} inference_logprobs.")
        if not any(mask):
            self.left_out += 1
            return []
        start = mask.index(True)
        credit = (row.get("advantages") or [None] * len(ids))[start]
        return [
            Rollout(
                prompt_ids=ids[:start],
                completion_ids=ids[start:],
                completion_mask=mask[start:],
                log_probs=[score if on else None for score, on in zip(scores[start:], mask[start:], strict=True)],
                advantage=as_reward(credit, "advantages"),
                policy_version=as_int(row.get("step", 0), "step"),
                group=ONE_ROW,
                meta={"env": row.get("env_name"), "rank": row.get("rank")},
            )
        ]


class TinkerReader:
    """tinker-cookbook's captured samples, `capture/sample.jsonl`, with the rewards of its rollout summaries.

    Sources: `capture/instrument.py` (9dfcc3a): records of kind "sample" with a `scope` (iteration, group_idx,
    traj_idx), prompt_tokens, and `samples` of tokens, logprobs, stop_reason. `rl/rollout_logging.py`: summaries with
    iteration, group_idx, traj_idx and total_reward, without tokens; name those files in the same command, and each
    sample gets the reward of its trajectory. A call is one trajectory: the turns of an episode are rows of one group.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: object = None) -> None:
        _only(given)
        self.rewards: dict[tuple[Any, ...], dict[Any, float]] = {}
        """By iteration, group and trajectory: the reward in each split."""
        self.left_out = 0
        self.without_reward = 0

    def about(self) -> str:
        """Describe which field was read as what."""
        num = sum(map(len, self.rewards.values()))
        rewards = f"reward=total_reward of {num:,} summaries" if num else "no rollout summaries"
        return (
            f"samples: prompt_ids=prompt_tokens, completion_ids=samples[].tokens, group=iteration+group_idx, {rewards}"
        )

    def learn(self, row: Row) -> None:
        """Take the reward of a trajectory from its rollout summary."""
        key = tuple(row.get(name) for name in ("iteration", "group_idx", "traj_idx"))
        reward = as_reward(field_of(row, "total_reward"), "total_reward")
        self.rewards.setdefault(key, {})[row.get("split")] = reward

    def _reward(self, split: Any, key: tuple[Any, ...]) -> float:
        """Return a trajectory's reward; where its split is not known, only one that all splits agree on."""
        known = self.rewards.get(key, {})
        if split in known:
            return known[split]
        values = {*known.values()} if split is None else set()
        return values.pop() if len(values) == 1 else math.nan

    def read(self, row: Row) -> list[Rollout]:
        """Return the samples of one call; a call that failed has none.

        Raises:
            DataError: a field is missing or of a wrong kind.
        """
        if row.get("kind", "sample") != "sample" or row.get("status") == "error":
            self.left_out += 1
            return []
        scope = row.get("scope") or {}
        split, iteration, group, traj = (scope.get(n) for n in ("split", "iteration", "group_idx", "traj_idx"))
        prompt_ids = as_ids(field_of(row, "prompt_tokens"), "prompt_tokens")
        made: list[Rollout] = []
        for i, sample in enumerate(as_list(field_of(row, "samples"), "samples")):
            member = i if traj is None else traj
            reward = self._reward(split, (iteration, group, member))
            self.without_reward += reward != reward
            scores = sample.get("logprobs")
            made.append(
                Rollout(
                    prompt_ids=prompt_ids,
                    completion_ids=as_ids(field_of(sample, "tokens"), "tokens"),
                    log_probs=None if scores is None else as_scores(scores, "logprobs"),
                    reward=reward,
                    group=ONE_ROW if group is None else (split, iteration, group),
                    policy_version=as_int(iteration or 0, "scope.iteration"),
                    finish_reason=str(sample.get("stop_reason") or ""),
                    created_at=as_number(row.get("created_at"), "created_at"),
                    meta={"scope": scope, "model_path": row.get("model_path")},
                )
            )
        return made


class NemoReader:
    """NeMo-RL's training data, `train_data_step{N}.jsonl`: padded token ids with a loss mask, one sequence per row.

    Each row has token_ids, input_lengths, token_loss_mask, rewards, and, by version, sample_loss_mask, advantages,
    generation_logprobs (of the engine that sampled), prev_logprobs and content. Rows whose sample is masked or that
    have no token to learn from are left out.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: object = None) -> None:
        _only(given)
        self.left_out = 0

    def about(self) -> str:
        """Describe which field was read as what."""
        return (
            "tokens=token_ids to input_lengths, mask=token_loss_mask, reward=rewards, log_probs=generation_logprobs, "
            "advantage=advantages"
        )

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollout of one row.

        Raises:
            DataError: a field is missing or of a wrong kind.
        """
        padded = as_ids(field_of(row, "token_ids"), "token_ids")
        length = as_int(row.get("input_lengths", len(padded)), "input_lengths")
        if not 0 <= length <= len(padded):
            raise DataError(f"input_lengths is {length} for {len(padded)} token_ids.")
        mask = [bool(item) for item in as_list(field_of(row, "token_loss_mask"), "token_loss_mask")[:length]]
        if len(mask) != length:
            raise DataError(f"{len(mask)} values of token_loss_mask for {length} tokens.")
        if not any(mask) or not row.get("sample_loss_mask", 1):
            self.left_out += 1
            return []
        start = mask.index(True)
        credit = row.get("advantages")
        scores = row.get("generation_logprobs")
        known = None if scores is None else as_scores(scores[start:length], "generation_logprobs")
        said = row.get("content")
        texts = [str(text) for text in said] if isinstance(said, list) else []
        return [
            Rollout(
                prompt="".join(texts[:-1]),
                completion="".join(texts[-1:]),
                prompt_ids=padded[:start],
                completion_ids=padded[start:length],
                completion_mask=mask[start:],
                log_probs=known and [score if on else None for score, on in zip(known, mask[start:], strict=True)],
                reward=as_reward(field_of(row, "rewards"), "rewards"),
                advantage=as_reward(credit[start] if isinstance(credit, list) else credit, "advantages"),
                meta={name: row[name] for name in ("idx", "agent_ref") if name in row},
            )
        ]


class SkyRLBatchReader:
    """Batches of SkyRL's generator: prompt_token_ids, response_ids, rewards, loss_masks, one item per trajectory.

    Rewards per token are summed. A group is what shares `instance_id` in trajectory_ids, else trajectories in turn with
    one prompt.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: object = None) -> None:
        _only(given)

    def about(self) -> str:
        """Describe which field was read as what."""
        return "prompt_ids=prompt_token_ids, completion_ids=response_ids, reward=rewards, log_probs=rollout_logprobs"

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one batch.

        Raises:
            DataError: a field is missing, of a wrong kind, or of another length.
        """
        num = len(as_list(field_of(row, "response_ids"), "response_ids"))
        names = ("prompt_token_ids", "rewards", "loss_masks", "rollout_logprobs", "stop_reasons", "trajectory_ids")
        columns: dict[str, list[Any]] = {}
        for name in names:
            values = row.get(name)
            columns[name] = [None] * num if values is None else as_list(values, name)
            if len(columns[name]) != num:
                raise DataError(f"field '{name}' has {len(columns[name])} items for {num} responses.")
        made: list[Rollout] = []
        for i, ids in enumerate(row["response_ids"]):
            prompt, reward, mask, scores, reason, trajectory = (columns[name][i] for name in names)
            instance = trajectory.get("instance_id") if isinstance(trajectory, Mapping) else None
            values = reward if isinstance(reward, list) else [reward]
            made.append(
                Rollout(
                    prompt_ids=as_ids(prompt, "prompt_token_ids"),
                    completion_ids=as_ids(ids, "response_ids"),
                    completion_mask=None if mask is None else [bool(item) for item in as_list(mask, "loss_masks")],
                    log_probs=None if scores is None else as_scores(scores, "rollout_logprobs"),
                    reward=as_reward(sum(as_reward(item, "rewards") for item in values), "rewards"),
                    finish_reason="" if reason is None else str(reason),
                    group=None if instance is None else ("instance", str(instance)),
                )
            )
        return made


def _weighed(item: Any) -> float:
    return as_reward(field_of(item, "score"), "score") * as_reward(item.get("weight", 1.0), "weight")


def _only(given: Mapping[str, str], *allowed: str) -> None:
    """Refuse `--field` options that a format cannot use."""
    for target in given:
        if target not in allowed:
            known = f"only for {' and '.join(allowed)}" if allowed else "not"
            raise DefinitionError(
                f"--field {target}={given[target]}: this format knows its fields; --field is {known}."
            )


def field_of(row: Any, name: str) -> Any:
    """Return a field that must be there.

    Raises:
        DataError: it is not, or `row` is no object.
    """
    if not isinstance(row, Mapping) or name not in row:
        there = ", ".join(sorted(map(str, row))) if isinstance(row, Mapping) else shown(row)
        raise DataError(f"there is no field '{name}' (here are: {there}).")
    return row[name]


def _leaves(nodes: Any) -> list[list[Row]]:
    """Return each path from a root to a leaf of a message graph."""
    graph = as_list(nodes, "nodes")
    parents = {node.get("parent") for node in graph}
    paths: list[list[Row]] = []
    for leaf in range(len(graph)):
        if leaf in parents:
            continue
        path: list[Row] = []
        place: int | None = leaf
        while place is not None:
            if not 0 <= place < len(graph) or len(path) > len(graph):
                parents = json.dumps([node.get("parent") for node in graph])[:80]
                raise DataError(f"the nodes do not form a tree: {parents}")
            path.append(graph[place])
            place = graph[place].get("parent")
        paths.append(path[::-1])
    return paths


def _spread(scores: list[float | None], mask: Sequence[Any], name: str) -> list[float | None]:
    """Widen scores of the sampled tokens to all tokens of a node."""
    if not scores:
        return [None] * len(mask)
    if len(scores) != sum(map(bool, mask)):
        raise DataError(f"a node has {sum(map(bool, mask))} sampled tokens and {len(scores)} {name}.")
    values = iter(scores)
    return [next(values) if on else None for on in mask]
