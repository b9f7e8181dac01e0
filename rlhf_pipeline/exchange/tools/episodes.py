"""verifiers 0.4 and prime-rl 0.8: episodes, `traces.jsonl`.

Writers: `write_episode` in `verifiers/v1/utils/trace_store.py` (verifiers 0.4.0), and `FileMonitor.log_episodes` in
`src/prime_rl/monitors/file.py` (prime-rl 0.8.0, commit 559b447), which writes `Episode.to_record()` under
`rollouts/step_N/KIND/SUBSET/`. A row is an `Episode` of `verifiers/v1/episode.py`: `env`, `task`, `group` (its `id`,
in training), `run`, `ok`, `is_timeout`, `errors`, `traces`. A trace (`verifiers/v1/trace.py`) has `agent`, `nodes`,
`calls`, `rewards` (score and weight by name), `ok`, `errors`, `stop_condition`. A node (`verifiers/v1/graph.py`) is a
message with the tokens that it adds: `token_ids`, `mask`, and `logprobs` and `advantages` of its sampled tokens,
rounded to 4 decimals; `parent` is the message before it. What is null is not written.

Each path from a root to a leaf is one trajectory; a compaction that was not taken up is none (`Trace.branches`). Its
reward is the trace's. Without an endpoint that gives token ids (most evaluations) only the messages are there. A
group is `group.id`, else the episodes of one task (`task.key`, `task.hash`), of each agent by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_pipeline.errors import DataError
from rlhf_pipeline.exchange.fields import (
    Fields,
    RawRollout,
    Row,
    as_ids,
    as_list,
    as_mask,
    as_reward,
    message_text,
    part_of,
)
from rlhf_pipeline.exchange.sequence import cut
from rlhf_pipeline.exchange.tool import Tool

_LIMITS = {"max_turns": "turns", "compaction_failed": "length"}
_LIMITS |= dict.fromkeys(("max_input_tokens", "max_output_tokens", "max_total_tokens"), "length")
"""Stop conditions by which a trace counts as cut off (`Trace.is_truncated`)."""
_ENGINE = ("ProviderError", "InterceptionError", "TunnelError")


def _read(fields: Fields) -> Iterator[RawRollout | None]:
    row = fields.row
    if not as_list(row["traces"], "traces"):
        yield None  # it failed before anything was sampled
    for trace in row["traces"]:
        agent = part_of(trace, "agent")
        paths = [path for path in _paths(trace) if any(trace["nodes"][place].get("sampled") for place in path)]
        if not agent.get("trainable", True) or not paths:
            yield None
            continue
        for path in paths:
            yield _trajectory(fields, trace, path)


def _trajectory(fields: Fields, trace: Row, path: Sequence[int]) -> RawRollout:
    row, agent, task = fields.row, part_of(trace, "agent"), part_of(trace, "task")
    made = _tokens([trace["nodes"][place] for place in path])
    rewards = [reward for reward in part_of(trace, "rewards").values() if reward is not None]
    made["reward"] = sum(map(_weighed, rewards)) if rewards else math.nan
    calls = [call for call in trace.get("calls") or () if call.get("node") in path and call.get("finish_reason")]
    limit = _LIMITS.get(str(trace.get("stop_condition")))
    made["finish_reason"] = limit or (calls[-1]["finish_reason"] if calls else "")
    work = part_of(part_of(row, "run"), "work")
    made["policy_version"] = part_of(work, "policy").get("start", work.get("step", 0))
    made["answer"] = part_of(task, "data").get("answer")
    found = fields.of(trace).made(made)
    group = part_of(row, "group").get("id") or task.get("key") or task.get("hash") or json.dumps(task, sort_keys=True)
    env = part_of(row, "env")
    meta = {"env": env.get("name") or env.get("id"), "agent": agent.get("name"), "trace": trace.get("id")}
    meta["stop_condition"] = trace.get("stop_condition")
    return RawRollout(**found, group=(group, agent.get("name")), failure=_failure(row, trace), meta=meta)


def _failure(row: Row, trace: Row) -> str:
    """Return the kind of a failure that the trace or its episode says, or nothing."""
    if trace.get("ok") and row.get("ok"):
        return ""
    if trace.get("is_timeout") or row.get("is_timeout"):
        return "timeout"
    errors = [*(row.get("errors") or ()), *(trace.get("errors") or ())]
    kind = errors[-1].get("type") if errors else ""
    return "engine" if kind in _ENGINE else "grader_error" if kind == "TaskError" else "tool_error"


def _weighed(item: Any) -> float:
    if not isinstance(item, Mapping) or "score" not in item:
        raise DataError("field 'rewards' must hold objects with a score and a weight.")
    return as_reward(item["score"], "score") * as_reward(item.get("weight", 1.0), "weight")


def _paths(trace: Row) -> Iterator[list[int]]:
    """Yield each path from a root to a leaf that is a training sample, as places of nodes."""
    nodes = as_list(trace.get("nodes") or [], "nodes")
    links = [node.get("semantic_parents") or () for node in nodes]
    accepted = {link["node"] for of in links for link in of if link["type"] == "compaction"}
    parents = {node.get("parent") for node in nodes}
    for leaf in range(len(nodes)):
        attempt = any(link["type"] == "compaction_attempt" for link in links[leaf])
        if leaf in parents or (attempt and leaf not in accepted):
            continue
        path, place = [], leaf
        while place is not None:
            if not 0 <= place < len(nodes) or len(path) > len(nodes):
                raise DataError(f"the nodes are no tree: {json.dumps([n.get('parent') for n in nodes])[:80]}")
            path.append(place)
            place = nodes[place].get("parent")
        yield path[::-1]


def _tokens(nodes: Sequence[Row]) -> dict[str, Any]:
    """Return the tokens of a path of messages, with their values, and its text."""
    first = next(place for place, node in enumerate(nodes) if node.get("sampled"))
    messages = [part_of(node, "message") for node in nodes]
    if not any(node.get("token_ids") for node in nodes):
        return {"prompt": messages[:first], "completion": messages[first:]}
    whole: dict[str, list[Any]] = {name: [] for name in ("tokens", "completion_mask", "log_probs", "advantage", "ref")}
    for node in nodes:
        ids, mask = as_ids(node.get("token_ids") or [], "token_ids"), as_mask(node.get("mask") or [], "mask")
        if len(mask) != len(ids):
            raise DataError(f"a node has {len(ids)} token_ids and {len(mask)} in its mask.")
        whole["tokens"] += ids
        whole["completion_mask"] += mask
        for target, name in (("log_probs", "logprobs"), ("advantage", "advantages"), ("ref", "reference_logprobs")):
            values = as_list(node.get(name) or [], name)
            if len(values) not in (0, sum(mask)):
                raise DataError(f"a node has {sum(mask)} sampled tokens and {len(values)} {name}.")
            each = iter(values)
            whole[target] += [next(each, None) if on else None for on in mask]
    if any(value is not None for value in whole["ref"]):
        whole["ref_log_probs"] = whole["ref"]
    del whole["ref"]
    texts = [message_text(message) for message in messages]
    return cut(whole) | {"prompt": "\n\n".join(texts[:first]), "completion": "\n\n".join(texts[first:])}


def _tool(name: str, summary: str, *, trains: bool) -> Tool:
    return Tool(
        name=name,
        summary=summary,
        signature=frozenset({"env", "task", "ok", "traces"}),
        also=lambda row: not trains or part_of(row, "run").get("type") == "train",
        about="tokens=traces[].nodes[].token_ids, mask=mask, log_probs=logprobs, reward=sum of rewards[].score*weight, "
        "finish_reason=the last of calls[].finish_reason, group=group.id or task.key, "
        "policy_version=run.work.policy.start",
        lacks=("token ids and log-probs, where the endpoint gave none",),
        read=_read,
    )


TOOLS = (
    _tool("prime-rl", "episodes of prime-rl's rollouts", trains=True),
    _tool("verifiers", "episodes of verifiers' evaluations", trains=False),
)
