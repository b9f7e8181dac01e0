"""AReaL 1.0: every episode of a workflow, those that it rejects as far as it returns them.

    workflow = RecordingWorkflow(RLVRWorkflow(...), TrajectoryRecorder("runs/areal/store"), temperature=1.0)

An engine that is called from a controller gets workflows by name, in separate processes:

    TRAJECTORY_STORE=runs/areal/store
    workflow="trajectory_store.adapters.areal.RecordingWorkflow"
    workflow_kwargs={"inner": "areal.workflow.rlvr.RLVRWorkflow", "inner_kwargs": {...}, "temperature": 1.0}

Source: `RolloutWorkflow.arun_episode` of `areal/api/workflow_api.py`; `_resolve_workflow` and `GroupedRolloutWorkflow`
of `areal/infra/remote_inf_engine.py`; `WorkflowContext` of `areal/infra/workflow_context.py`; and what
`areal/workflow/rlvr.py` returns (areal 1.0.4): tensors `[1, T]` under `input_ids`, `loss_mask`, `logprobs`, `versions`
(-1 for the prompt), `rewards`.
"""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import asyncio
import importlib
import itertools
import sys
import uuid
from collections.abc import Awaitable
from typing import Any

from trajectory_store.adapters import recorder_here
from trajectory_store.adapters.recorded_rewards import episode_outcomes
from trajectory_store.errors import SchemaError
from trajectory_store.recorder import TrajectoryRecorder

_FIELDS = ("input_ids", "loss_mask", "logprobs", "versions")


class RecordingWorkflow:
    """A workflow that records the episodes of another one, and is that one for everything else.

    AReaL takes it for a workflow because it is registered as one, with the class that the other workflow derives from.
    A group is what `GroupedRolloutWorkflow` makes of one call: it asks for all of its episodes before the first begins.

    Args:
        inner: the workflow, or the import path of its class.
        recorder: where to; None is the process's recorder into `TRAJECTORY_STORE`.
        temperature: of sampling.
        inner_kwargs: arguments of the class, where `inner` is a path.

    Raises:
        SchemaError: `inner` is not a workflow.
    """

    def __init__(
        self,
        inner: Any,
        recorder: TrajectoryRecorder | None = None,
        *,
        temperature: float | None = None,
        inner_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(inner, str):
            module, _, name = inner.rpartition(".")
            inner = getattr(importlib.import_module(module), name)(**(inner_kwargs or {}))
        if not hasattr(inner, "arun_episode"):
            raise SchemaError(
                f"{type(inner).__name__} has no arun_episode method. AReaL converts an agent to a RolloutWorkflow: "
                "record a workflow, such as areal.workflow.rlvr.RLVRWorkflow."
            )
        self.inner, self._recorder, self.temperature = inner, recorder, temperature
        self._id, self._numbers = uuid.uuid4().hex, itertools.count()
        self._open_task: tuple[Any, int, str] | None = None
        """The task that requests episodes, the identity of their data and their group, until the first episode begins.
        """
        for base in type(inner).__mro__:
            if base.__name__ == "RolloutWorkflow":
                base.register(type(self))  # pyright: ignore[reportAttributeAccessIssue]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def recorder(self) -> TrajectoryRecorder:
        """The store to record in."""
        return self._recorder or recorder_here()

    def arun_episode(self, engine: Any, data: dict[str, Any]) -> Awaitable[Any]:
        """Return what the workflow returns, once it is recorded."""
        asking = (_task(), id(data))
        if self._open_task is None or self._open_task[:2] != asking:
            self._open_task = (*asking, str(next(self._numbers)))
        return self._run(engine, data, self._open_task[2])

    async def _run(self, engine: Any, data: dict[str, Any], group: str) -> Any:
        if self._open_task is not None and self._open_task[2] == group:
            self._open_task = None
        episode = await self.inner.arun_episode(engine, data)
        if episode:
            self._record(episode, data, group)
        return episode

    def _record(self, episode: Any, data: dict[str, Any], group: str) -> None:
        """Record the trajectories of a workflow, or the interactions of an agent's session as one episode."""
        if "input_ids" in episode:
            rows, session = _rows(episode), None
        else:  # of interactions with another provider's model there are no tokens
            items = [item for item in episode.values() if getattr(item, "has_tensor_data", True)]
            parts = [_rows(item.to_tensor_dict()) for item in items]
            rows = {name: [row for part in parts for row in part[name]] for name in (*_FIELDS, "rewards")}
            session = 0
        num = len(rows["input_ids"])
        if not num:
            return
        starts = [mask.index(1) if 1 in mask else len(mask) for mask in rows["loss_mask"]]
        ids, masks, scores, versions = (
            [row[start:] for row, start in zip(rows[n], starts, strict=True)] for n in _FIELDS
        )
        context = _context()
        self.recorder.record(
            prompt_ids=[row[:start] for row, start in zip(rows["input_ids"], starts, strict=True)],
            completion_ids=ids,
            completions=[""] * num,
            completion_masks=masks,
            log_probs=scores,
            rewards=episode_outcomes(rows["rewards"], [session] * num),
            token_versions=[_filled(row) for row in versions],
            temperature=self.temperature,
            answers=[data.get("answer")] * num,
            evaluation=bool(getattr(context, "is_eval", False)),
            groups=[group] * num,
            episodes=[session] * num,
            run_id=self._id,  # the numbers of groups restart in each workflow
            one_prompt=False,  # AReaL forms the groups, and a workflow may begin each episode differently
            metas=[
                {"query_id": data.get("query_id", data.get("id")), "task_id": getattr(context, "task_id", None)}
                | ({} if session is None else {"reward": reward})
                for reward in rows["rewards"]
            ],
            source="areal",
        )


def _rows(part: Any) -> dict[str, list[Any]]:
    """Return the fields of a batch of AReaL's as lists, without padding."""
    values = {name: value.tolist() for name, value in part.items() if hasattr(value, "tolist")}
    real = [[token for token, on in enumerate(row) if on] for row in values["attention_mask"]]
    rows = {name: [[row[i] for i in at] for row, at in zip(values[name], real, strict=True)] for name in _FIELDS}
    return rows | {"rewards": values["rewards"]}


def _task() -> Any:
    """Return the task that calls, or None outside of an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _context() -> Any:
    """Return what AReaL knows of the call in progress, or None outside of it."""
    module = sys.modules.get("areal.infra.workflow_context")
    return None if module is None else module.get()


def _filled(versions: list[int]) -> list[int]:
    """Return the version of each token, for words of an environment (-1) that of the token before."""
    filled_versions: list[int] = []
    for version in versions:
        filled_versions.append(version if version >= 0 or not filled_versions else filled_versions[-1])
    return filled_versions


if (_api := sys.modules.get("areal.api.workflow_api")) is not None:  # AReaL imports this by name, and asks for a class
    _api.RolloutWorkflow.register(RecordingWorkflow)
