"""Formats with a structure of their own: graded solutions, message graphs, captured samples, masked sequences."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pipeline.errors import DataError, DefinitionError
from rlhf_pipeline.exchange._completion import (
    ONE_ROW,
    Rollout,
    Row,
    as_answer,
    as_ids,
    as_int,
    as_list,
    as_mask,
    as_number,
    as_reward,
    as_scores,
    as_text,
    field_of,
    message_text,
)
from rlhf_pipeline.exchange._fields import Format


class _OwnFields:
    """A reader of a format that knows its fields.

    Attributes:
        targets: what `--field` may name nevertheless.
        said: which field is read as what.
        left_out: rows, or parts of rows, that are no finished trajectories.
    """

    targets: tuple[str, ...] = ()
    said: str

    def __init__(self, row: Row, given: Mapping[str, str], layout: Format) -> None:
        for target in given:
            if target not in self.targets:
                known = f"only for {' and '.join(self.targets)}" if self.targets else "not"
                raise DefinitionError(
                    f"--field {target}={given[target]}: this format knows its fields; --field is {known}."
                )
        self.left_out = 0

    def about(self) -> str:
        """Describe which field was read as what."""
        return self.said


class SolutionsReader(_OwnFields):
    """Graded solutions in the form of GSM8K's `example_model_solutions.jsonl`.

    Source: the file itself (openai/grade-school-math): question, ground_truth, and one object per model with
    `is_correct` and `solution`. A row is one group; the reward is 1.0 where the solution is correct.
    """

    targets = ("prompt", "answer")

    def __init__(self, row: Row, given: Mapping[str, str], layout: Format) -> None:
        super().__init__(row, given, layout)
        self.question = given.get("prompt", "question")
        self.answer = given.get("answer", "ground_truth")
        self.said = f"prompt={self.question}, answer={self.answer}, completion=*.solution, reward=*.is_correct, "
        self.said += "one group per line"

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


class EpisodeReader(_OwnFields):
    """prime-rl's files of episodes, `rollouts/step_N/train/{all,effective}/traces.jsonl`, and single traces.

    Source: `FileMonitor.log_episodes` (prime-rl 559b447), which writes `verifiers.v1.Episode.to_record` (a60a606): a
    `group.id`, the `run.work.policy.start` version, and `traces` of `nodes` with token_ids, mask and logprobs. Each
    path from the root to a leaf is one trajectory; the reward is the sum of score times weight. Traces that failed
    (`ok` false), that belong to an agent that is not trained, or that have no sampled tokens are left out. A row that
    is a trace by itself, as verifiers saves them, is an episode of one; its group is its task.
    """

    said = "episodes: group=group.id, policy_version=run.work.policy.start, reward=sum of traces[].rewards"

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollouts of one episode.

        Raises:
            DataError: a field is missing or of a wrong kind.
        """
        if "nodes" in row:
            task = json.dumps(row.get("task"), sort_keys=True, default=str)
            row = {"traces": [row], "group": {"id": task}, "env": {"id": row.get("env_id")}}
        work = (row.get("run") or {}).get("work") or {}
        version = (work.get("policy") or {}).get("start", work.get("step", 0))
        group = (row.get("group") or {}).get("id", ONE_ROW)
        env = row.get("env") or {}
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
                    "env": env.get("name") or env.get("id"),
                    "agent": agent.get("name"),
                    "trace": trace.get("id"),
                    "stop_condition": trace.get("stop_condition"),
                }
            made += kept
        return made

    def _branch(self, trace: Row, path: Sequence[Row]) -> Rollout | None:
        tokens: list[int] = []
        mask: list[bool] = []
        scores: list[Any] = []
        ref: list[Any] = []
        for node in path:
            ids, sampled = as_ids(node.get("token_ids") or [], "token_ids"), as_mask(node.get("mask") or [], "mask")
            if len(sampled) != len(ids):
                raise DataError(f"a node has {len(ids)} token_ids and {len(sampled)} in its mask.")
            tokens += ids
            mask += sampled
            scores += _spread(node, "logprobs", sampled)
            ref += _spread(node, "reference_logprobs", sampled)
        said = [message_text(node.get("message") or {}) for node in path]
        first = next((i for i, node in enumerate(path) if any(node.get("mask") or [])), len(path))
        calls = [call for call in trace.get("calls") or [] if call.get("finish_reason")]
        values = [reward for reward in (trace.get("rewards") or {}).values() if reward is not None]
        return _masked(
            tokens,
            mask,
            scores,
            None if all(item is None for item in ref) else ref,
            credit=next((node["advantages"][0] for node in path if node.get("advantages")), None),
            prompt="\n\n".join(said[:first]),
            completion="\n\n".join(said[first:]),
            reward=as_reward(sum(map(_weighed, values)), "rewards") if values else math.nan,
            finish_reason=str(calls[-1]["finish_reason"]) if calls else "",
            answer=as_answer(((trace.get("task") or {}).get("data") or {}).get("answer")),
        )


class MaskedReader(_OwnFields):
    """Sequences as a trainer learns from them: token ids, a mask of those that have a loss, values per token.

    The format's table names the fields: `tokens` up to `length`, `completion_mask`, `log_probs`, `reward`, `advantage`,
    `policy_version`; `counts`, which is 0 for a sequence that is not learned from; `texts`, the prompt's and last the
    completion's; and those that go to `meta`. Sequences without a token to learn from are left out.

    Args:
        row: the first row.
        given: the user's `--field` options.
        layout: what the format fixes.
        group: of each row; None groups rows in turn with one prompt.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: Format, *, group: str | None = None) -> None:
        super().__init__(row, given, layout)
        self.fields = layout.fields
        self.group = group
        self.said = ", ".join(f"{target}={'+'.join(names)}" for target, names in self.fields.items())
        self.said += "" if "reward" in self.fields else "; it has no rewards"

    def _value(self, row: Row, target: str, default: Any = None) -> Any:
        return row.get(self.fields[target][0], default) if target in self.fields else default

    def read(self, row: Row) -> list[Rollout]:
        """Return the rollout of one row.

        Raises:
            DataError: a field is missing, of a wrong kind, or of another length.
        """
        (ids_name,), (mask_name,), (scores_name,) = (self.fields[n] for n in ("tokens", "completion_mask", "log_probs"))
        ids, mask = as_ids(field_of(row, ids_name), ids_name), as_mask(field_of(row, mask_name), mask_name)
        scores = row.get(scores_name)
        length = as_int(self._value(row, "length", len(ids)), "length")
        there = {ids_name: ids, mask_name: mask} | (
            {} if scores is None else {scores_name: as_list(scores, scores_name)}
        )
        if not 0 <= length <= len(ids) or len({len(values) for values in there.values()}) > 1:
            raise DataError(f"{', '.join(f'{len(values)} {name}' for name, values in there.items())}, length {length}.")
        reward = field_of(row, self.fields["reward"][0]) if "reward" in self.fields else None
        said = self._value(row, "texts")
        texts = [str(text) for text in said] if isinstance(said, list) else []
        made = None
        if self._value(row, "counts", 1):
            made = _masked(
                ids[:length],
                mask[:length],
                None if scores is None else scores[:length],
                credit=self._value(row, "advantage"),
                prompt="".join(texts[:-1]),
                completion="".join(texts[-1:]),
                reward=as_reward(reward, "reward"),
                policy_version=as_int(self._value(row, "policy_version", 0), "policy_version"),
                group=self.group,
                meta={name: row[name] for name in self.fields.get("meta", ()) if name in row},
            )
        self.left_out += made is None
        return [] if made is None else [made]


class TinkerReader(_OwnFields):
    """tinker-cookbook's captured samples, `capture/sample.jsonl`, with the rewards of its rollout summaries.

    Sources: `capture/instrument.py` (9dfcc3a): records of kind "sample" with a `scope` (iteration, group_idx,
    traj_idx), prompt_tokens, and `samples` of tokens, logprobs, stop_reason. `rl/rollout_logging.py`: summaries with
    iteration, group_idx, traj_idx and total_reward, without tokens; name those files in the same command, and each
    sample gets the reward of its trajectory. A call is one trajectory: the turns of an episode are rows of one group.
    """

    def __init__(self, row: Row, given: Mapping[str, str], layout: Format) -> None:
        super().__init__(row, given, layout)
        self.rewards: dict[tuple[Any, ...], dict[Any, float]] = {}
        """By iteration, group and trajectory: the reward in each split."""

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


def _weighed(item: Any) -> float:
    return as_reward(field_of(item, "score"), "score") * as_reward(item.get("weight", 1.0), "weight")


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


def _spread(node: Row, name: str, mask: Sequence[bool]) -> list[Any]:
    """Return the log-probs of a node's tokens, given for its sampled tokens only; None for the others."""
    scores = as_list(node.get(name) or [], name)
    if not scores:
        return [None] * len(mask)
    if len(scores) != sum(mask):
        raise DataError(f"a node has {sum(mask)} sampled tokens and {len(scores)} {name}.")
    values = iter(scores)
    return [next(values) if on else None for on in mask]


def _masked(
    tokens: Sequence[int],
    mask: Sequence[bool],
    log_probs: Sequence[Any] | None,
    ref_log_probs: Sequence[Any] | None = None,
    *,
    credit: Any,
    **more: Any,
) -> Rollout | None:
    """Return a sequence as a rollout whose completion starts with the first sampled token; None without one.

    Values per token have the length of `tokens`; `credit` is one advantage, or one per token.
    """
    if not any(mask):
        return None
    start = list(mask).index(True)

    def scored(values: Sequence[Any] | None, name: str) -> list[float | None] | None:
        if values is None:
            return None
        pairs = zip(values[start:], mask[start:], strict=True)
        return as_scores([value if on else None for value, on in pairs], name)

    return Rollout(
        prompt_ids=tokens[:start],
        completion_ids=tokens[start:],
        completion_mask=mask[start:],
        log_probs=scored(log_probs, "log_probs"),
        ref_log_probs=scored(ref_log_probs, "ref_log_probs"),
        advantage=as_reward(credit[start] if isinstance(credit, list) else credit, "advantages"),
        **more,
    )
