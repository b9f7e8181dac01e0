"""AReaL's own engine resolves our workflow, groups its episodes, and executes them for training and evaluation.

Runs with the files of the wheel `areal==1.0.4` on the path (its pins prevent an installation beside a newer torch):
`python in_areal.py FOLDER`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from areal.api.workflow_api import RolloutWorkflow
from areal.infra import workflow_context
from areal.infra.controller.rollout_controller import RolloutController
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from areal.infra.workflow_executor import check_trajectory_format

from trajectory_store import TrajectoryStore
from trajectory_store.adapters.areal import RecordingWorkflow
from trajectory_store.recorder import TrajectoryRecorder

LOGGER = SimpleNamespace(warning=lambda *_: None, info=lambda *_: None)
ENGINE = SimpleNamespace(logger=LOGGER, config=SimpleNamespace(agent=None))


class Episodes(RolloutWorkflow):
    """A workflow whose episodes take turns, and of which every third is rejected."""

    def __init__(self, reject: bool = False) -> None:
        self.reject, self.asked = reject, 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Return what `RLVRWorkflow` returns."""
        number = self.asked = self.asked + 1
        await asyncio.sleep(0.001 * (number % 3))
        if self.reject and number % 3 == 0:
            return None
        prompt = data["prompt"]
        row = {
            "input_ids": torch.tensor([*prompt, 9, number], dtype=torch.int32),
            "loss_mask": torch.tensor([0] * len(prompt) + [1, 1], dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * len(prompt) + [-1.0, -2.0]),
            "versions": torch.tensor([-1] * len(prompt) + [3, 4], dtype=torch.int32),
            "attention_mask": torch.ones(len(prompt) + 2, dtype=torch.bool),
            "rewards": torch.tensor(float(number % 2)),
        }
        return {name: value.unsqueeze(0) for name, value in row.items()}


def resolved(workflow: Any, group_size: int, **kwargs: Any) -> Any:
    """Return what AReaL's engine makes of a workflow."""
    return RemoteInfEngine._resolve_workflow(ENGINE, workflow, kwargs.get("workflow_kwargs"), group_size)


async def run(workflow: Any, data: dict[str, Any], task: int, *, is_eval: bool = False) -> Any:
    """Call a workflow as AReaL's executor does."""
    workflow_context.set(workflow_context.WorkflowContext(is_eval=is_eval, task_id=task))
    trajectory = await workflow.arun_episode(ENGINE, data)
    if trajectory is not None:
        check_trajectory_format(trajectory, logger=LOGGER)
    return trajectory


async def epochs(workflow: Any) -> None:
    """Take the same two rows of data in two epochs, all at once, and one of them in an evaluation."""
    data = [{"prompt": [1, 2], "query_id": "q0"}, {"prompt": [5], "answer": "2"}]
    for epoch in range(2):
        calls = [asyncio.create_task(run(workflow, row, 10 * epoch + i)) for i, row in enumerate(data)]
        replies = await asyncio.gather(*calls)
        assert [trajectory["input_ids"].shape[0] for trajectory in replies] == [4, 4]
    await asyncio.create_task(run(workflow, data[0], 99, is_eval=True))


def main(folder: Path) -> None:
    """Resolve, run, and look at the store."""
    with TrajectoryRecorder(folder / "store") as recorder:
        ours = RecordingWorkflow(Episodes(), recorder, temperature=0.5)
        assert isinstance(ours, RolloutWorkflow)
        assert resolved(ours, 1) is ours
        grouped = resolved(ours, 4)
        assert type(grouped) is GroupedRolloutWorkflow
        asyncio.run(epochs(grouped))
    with TrajectoryStore.open(folder / "store") as store:
        rows = store.read(store.ids())
    groups: dict[int, list[Any]] = {}
    for i, group in enumerate(rows["group_id"].tolist()):
        about = json.loads(rows["meta"][i])["prompt"]
        prompt = rows["input_ids"][i][: rows["num_prompt_tokens"][i]].tolist()
        groups.setdefault(group, []).append((prompt, bool(rows["evaluation"][i]), about["task_id"]))
    assert sorted(len(members) for members in groups.values()) == [4] * 5, groups
    assert all(len({str(member) for member in members}) == 1 for members in groups.values()), groups
    assert sum(members[0][1] for members in groups.values()) == 1

    # By name, as a controller passes a workflow to the engines of its workers.
    os.environ["TRAJECTORY_STORE"] = str(folder / "named")
    name = "trajectory_store.adapters.areal.RecordingWorkflow"
    assert RolloutController._resolve_workflow_str(None, RecordingWorkflow) == name
    sys.modules["episodes_of_a_test"] = sys.modules["__main__"]
    arguments = {"inner": "episodes_of_a_test.Episodes", "inner_kwargs": {"reject": True}, "temperature": 1.0}
    by_name = resolved(name, 3, workflow_kwargs=arguments)
    assert type(by_name) is GroupedRolloutWorkflow
    assert type(resolved(RecordingWorkflow, 1, workflow_kwargs=arguments)) is RecordingWorkflow
    trajectory = asyncio.run(run(by_name, {"prompt": [1]}, 0))
    assert trajectory["input_ids"].shape[0] == 2
    with TrajectoryStore.open(folder / "named") as store:
        assert len(store) == 2
        assert len(set(store.read_scalars("group_id").tolist())) == 1
    sys.stdout.write("all accepted\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
