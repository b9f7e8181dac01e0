"""AReaL 1.0: every episode of a workflow, those that it rejects as far as it returns them.

    workflow = RecordingWorkflow(RLVRWorkflow(...), TrajectoryRecorder("runs/areal/store"), temperature=1.0)

Source: `RolloutWorkflow.arun_episode` of `areal/api/workflow_api.py`, and what `areal/workflow/rlvr.py` returns
(areal 1.0.4): tensors `[1, T]` under `input_ids`, `loss_mask`, `logprobs`, `versions` (-1 for the prompt), `rewards`.
"""

# pyright: standard
# Foreign data, whose types are told apart at run time.
from __future__ import annotations

from typing import Any

from trajectory_store.recorder import TrajectoryRecorder


class RecordingWorkflow:
    """A workflow that records the episodes of another one, and is that one for everything else."""

    def __init__(self, inner: Any, recorder: TrajectoryRecorder, *, temperature: float | None = None) -> None:
        self.inner, self.recorder, self.temperature = inner, recorder, temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Return what the workflow returns, once it is recorded; the group is the data's `query_id` or `id`."""
        episode = await self.inner.arun_episode(engine, data)
        if not episode:
            return episode
        parts = [episode] if "input_ids" in episode else [item.to_tensor_dict() for item in episode.values()]
        for part in parts:
            self._record(part, data)
        return episode

    def _record(self, part: Any, data: dict[str, Any]) -> None:
        rows = {name: value.tolist() for name, value in part.items() if hasattr(value, "tolist")}
        whole = [[token for token, on in enumerate(row) if on] for row in rows["attention_mask"]]
        ids, masks, scores, versions = (
            [[row[place] for place in places] for row, places in zip(rows[name], whole, strict=True)]
            for name in ("input_ids", "loss_mask", "logprobs", "versions")
        )
        starts = [mask.index(1) if 1 in mask else len(mask) for mask in masks]
        completions = [slice(start, None) for start in starts]
        group = data.get("query_id", data.get("id"))
        self.recorder.record(
            prompt_ids=[row[:start] for row, start in zip(ids, starts, strict=True)],
            completion_ids=[row[at] for row, at in zip(ids, completions, strict=True)],
            completions=[""] * len(ids),
            completion_masks=[row[at] for row, at in zip(masks, completions, strict=True)],
            log_probs=[row[at] for row, at in zip(scores, completions, strict=True)],
            rewards=rows["rewards"],
            token_versions=[_filled(row[at]) for row, at in zip(versions, completions, strict=True)],
            temperature=self.temperature,
            answers=[data.get("answer")] * len(ids),
            groups=None if group is None else [str(group)] * len(ids),
            source="areal",
        )


def _filled(versions: list[int]) -> list[int]:
    """Return the version of each token, for words of an environment (-1) that of the token before."""
    filled_versions: list[int] = []
    for version in versions:
        filled_versions.append(version if version >= 0 or not filled_versions else filled_versions[-1])
    return filled_versions
