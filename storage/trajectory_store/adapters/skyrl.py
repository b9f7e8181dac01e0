"""SkyRL 0.4: what a generator returns, before the trainer filters it.

    class Exp(BasePPOExp):
        def get_generator(self, *args, **kwargs):
            return RecordingGenerator(super().get_generator(*args, **kwargs), TrajectoryRecorder("runs/skyrl/store"))

Source: `GeneratorInterface`, `GeneratorInput` and `GeneratorOutput` of `skyrl/train/generators/base.py` (skyrl 0.4.0).
"""

# pyright: standard
# Foreign data, whose types are told apart at run time.
from __future__ import annotations

from typing import Any

from trajectory_store.recorder import TrajectoryRecorder


class RecordingGenerator:
    """A generator that records what another one returns, and is that one for everything else."""

    def __init__(self, inner: Any, recorder: TrajectoryRecorder) -> None:
        self.inner, self.recorder = inner, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the generator returns, once it is recorded."""
        output = await self.inner.generate(input_batch, *args, **kwargs)
        about = input_batch.get("batch_metadata")
        ids, num = output["response_ids"], len(output["response_ids"])
        trajectory_ids = output.get("trajectory_ids") or (input_batch.get("trajectory_ids") or [])
        trajectory_ids = trajectory_ids if len(trajectory_ids) == num else None
        steps = output.get("is_last_step")
        ends = [end or "" for end in output.get("stop_reasons") or [""] * num]
        self.recorder.record(
            prompt_ids=output["prompt_token_ids"],
            completion_ids=ids,
            completions=[""] * num,
            completion_masks=output["loss_masks"],
            log_probs=output.get("rollout_logprobs"),
            rewards=[sum(reward) if isinstance(reward, list) else reward for reward in output["rewards"]],
            finish_reasons=ends,
            temperature=(input_batch.get("sampling_params") or {}).get("temperature"),
            policy_version=None if about is None else int(about.global_step),
            evaluation=about is not None and str(about.training_phase) == "eval",
            groups=None
            if trajectory_ids is None
            else [f"{_step(about)}/{trajectory_id.instance_id}" for trajectory_id in trajectory_ids],
            metas=[
                {
                    **(
                        {}
                        if trajectory_ids is None
                        else {"uid": trajectory_ids[i].instance_id, "repetition": trajectory_ids[i].repetition_id}
                    ),
                    **({} if steps is None else {"last_step": bool(steps[i])}),
                }
                for i in range(num)
            ],
            source="skyrl",
        )
        return output


def _step(about: Any) -> int:
    return -1 if about is None else int(about.global_step)
