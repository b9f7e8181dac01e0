"""SkyRL's own trainer generates through our generator, and ranks step-wise trajectories as their episodes are stored.

Runs in an environment of `skyrl==0.4.0`: `python in_skyrl.py FOLDER`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl.train.trainer import RayPPOTrainer

from trajectory_store import TrajectoryStore
from trajectory_store.adapters.skyrl import RecordingGenerator
from trajectory_store.recorder import TrajectoryRecorder


class Steps(GeneratorInterface):
    """Two trajectories for each prompt, of two steps and of one, of which the first succeeds."""

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """Return steps as `SkyRLGymGenerator` does with `step_wise_trajectories`."""
        rows: dict[str, list[Any]] = {name: [] for name in GeneratorOutput.__annotations__}
        for identity in input_batch["trajectory_ids"] or []:
            size = 2 - identity.repetition_id
            for step in range(size):
                rows["prompt_token_ids"].append([1, 2, 3][: 1 + 2 * step])
                rows["response_ids"].append([4 + identity.repetition_id])
                rows["rewards"].append(float(step == 1))
                rows["loss_masks"].append([1])
                rows["stop_reasons"].append("stop")
                rows["rollout_logprobs"].append([-1.0])
                rows["trajectory_ids"].append(identity)
                rows["is_last_step"].append(step == size - 1)
        columns = {name: values or None for name, values in rows.items()}
        return GeneratorOutput(**columns | {"rollout_metrics": {}})  # type: ignore[typeddict-item]


def trainer_of(generator: Any) -> Any:
    """Return a trainer of SkyRL's that was not started."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.generator, trainer.all_metrics = generator, {}
    algorithm = SimpleNamespace(
        advantage_estimator="grpo", gamma=1.0, lambd=1.0, grpo_norm_by_std=False, zero_variance_filter=False
    )
    trainer.cfg = SimpleNamespace(
        generator=SimpleNamespace(
            step_wise_trajectories=True,
            merge_stepwise_output=False,
            inference_engine=SimpleNamespace(enable_return_routed_experts=False),
        ),
        trainer=SimpleNamespace(algorithm=algorithm),
    )
    return trainer


def main(folder: Path) -> None:
    """Generate through SkyRL's trainer for training and evaluation, and compare advantages with what is stored."""
    with TrajectoryRecorder(folder / "store") as recorder:

        class Exp(BasePPOExp):
            """As docs/beside.md prints it."""

            def get_generator(self, *args: Any, **kwargs: Any) -> Any:
                return RecordingGenerator(Steps(), recorder)

        generator = Exp.get_generator(object.__new__(Exp), None, None, None)
        trainer = trainer_of(generator)
        identities = [TrajectoryID(str(uid), repetition) for uid in range(2) for repetition in range(2)]
        for phase in ("train", "eval"):
            batch = GeneratorInput(
                prompts=[[{"role": "user", "content": "x"}]] * 4, env_classes=["e"] * 4, env_extras=None,
                sampling_params={"temperature": 0.5}, trajectory_ids=identities,
                batch_metadata=BatchMetadata(global_step=3, training_phase=phase),
            )  # fmt: skip
            output = asyncio.run(RayPPOTrainer.generate(trainer, batch))
    uids = [identity.instance_id for identity in output["trajectory_ids"]]
    rewards = torch.tensor(output["rewards"])[:, None]
    data = TrainingInputBatch(
        {"rewards": rewards, "response_mask": torch.ones_like(rewards), "values": None}  # type: ignore[dict-item]
    )
    data.metadata = {
        "is_last_step": output["is_last_step"], "uids": uids, "pad_size": 0, "avg_response_length": 1.0,
    }  # fmt: skip
    advantages = RayPPOTrainer.compute_advantages_and_returns(trainer, data)["advantages"][:, 0]
    with TrajectoryStore.open(folder / "store") as store:
        rows = store.read(store.ids())
    training = np.flatnonzero(~np.array(rows["evaluation"]))
    assert len(training) == len(rows["evaluation"]) - len(training) == len(uids)
    assert set(rows["group_id"][training]).isdisjoint(rows["group_id"][rows["evaluation"]])
    ours = ranked(rows, training)
    assert np.allclose(ours, advantages.numpy()), (ours, advantages)
    sys.stdout.write(f"advantages {advantages.tolist()}\nall accepted\n")


def ranked(rows: dict[str, Any], at: Any) -> Any:
    """Return the advantage of each row from the store: outcomes of episodes less the mean of those of their group."""
    outputs = []
    for row in at:
        members = [i for i in at if rows["group_id"][i] == rows["group_id"][row]]
        last = [i for i in members if rows["episode_row"][i] == rows["episode_size"][i] - 1]
        episode = row + rows["episode_size"][row] - 1 - rows["episode_row"][row]
        outputs.append(rows["task_reward"][episode] - np.mean([rows["task_reward"][i] for i in last]))
    return np.array(outputs)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
