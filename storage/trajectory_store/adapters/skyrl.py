"""SkyRL 0.4: what a generator returns, before the trainer filters it.

    class Exp(BasePPOExp):
        def get_generator(self, *args, **kwargs):
            return RecordingGenerator(super().get_generator(*args, **kwargs), TrajectoryRecorder("runs/skyrl/store"))

Source: `GeneratorInterface`, `GeneratorInput` and `GeneratorOutput` of `skyrl/train/generators/base.py`, and
`compute_advantages_and_returns` of `skyrl/train/trainer.py`, which ranks the last steps of step-wise trajectories
(skyrl 0.4.0).
"""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

from typing import Any

from trajectory_store.adapters.recorded_rewards import episode_outcomes
from trajectory_store.recorder import TrajectoryRecorder


class RecordingGenerator:
    """A generator that records what another one returns, and is that one for everything else.

    SkyRL numbers prompts within a data set and a step, so groups are named within this recorder.
    """

    def __init__(self, inner: Any, recorder: TrajectoryRecorder) -> None:
        self.inner, self.recorder = inner, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the generator returns, once it is recorded; the steps of a trajectory are an episode."""
        output = await self.inner.generate(input_batch, *args, **kwargs)
        about = input_batch.get("batch_metadata")
        ids, num = output["response_ids"], len(output["response_ids"])
        identities = output.get("trajectory_ids") or (input_batch.get("trajectory_ids") or [])
        identities = identities if len(identities) == num else None
        steps = output.get("is_last_step")
        episodes = None if steps is None else _episodes(steps)
        rewards = [sum(reward) if isinstance(reward, list) else reward for reward in output["rewards"]]
        ends = [end or "" for end in output.get("stop_reasons") or [""] * num]
        self.recorder.record(
            prompt_ids=output["prompt_token_ids"],
            completion_ids=ids,
            completions=[""] * num,
            completion_masks=output["loss_masks"],
            log_probs=output.get("rollout_logprobs"),
            rewards=rewards if episodes is None else episode_outcomes(rewards, episodes),
            finish_reasons=ends,
            temperature=(input_batch.get("sampling_params") or {}).get("temperature"),
            policy_version=None if about is None else int(about.global_step),
            evaluation=about is not None and str(about.training_phase) == "eval",
            groups=None
            if identities is None
            else [f"{_step(about)}/{identity.instance_id}" for identity in identities],
            episodes=episodes,
            run_id=self.recorder.session_id,
            one_prompt=False,  # SkyRL forms the groups, and an environment may begin each trajectory differently
            metas=[_meta(identities, steps, rewards, i) for i in range(num)],
            source="skyrl",
        )
        return output


def _episodes(last_steps: list[bool]) -> list[int]:
    """Return the number of each step's trajectory in the output, where trajectories come one after the other."""
    numbers, number = [], 0
    for last in last_steps:
        numbers.append(number)
        number += bool(last)
    return numbers


def _meta(identities: Any, last_steps: Any, rewards: list[Any], i: int) -> dict[str, Any]:
    """Return SkyRL's identity of a row, and of a step its own reward, which SkyRL does not rank."""
    meta: dict[str, Any] = {}
    if identities is not None:
        meta |= {"uid": identities[i].instance_id, "repetition": identities[i].repetition_id}
    if last_steps is not None:
        meta |= {"last_step": bool(last_steps[i]), "step_reward": rewards[i]}
    return meta


def _step(about: Any) -> int:
    return -1 if about is None else int(about.global_step)
