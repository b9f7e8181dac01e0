"""A trainer of 200 rollouts that records through one adapter, and prints each that it was told is stored.

A rollout that was not acknowledged is sampled again, and then has other tokens, as in a trainer; but NeMo-Gym sends the
same call again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.trajectory_store import peers
from trajectory_store.adapters import areal, nemo_gym, skyrl, slime, trl, verl
from trajectory_store.recorder import TrajectoryRecorder

NUM = 200
Take = Callable[[int, int], None]
"""Takes a rollout of two completions by its number and the attempt, and returns once it is stored."""


def _tokens(attempt: int, number: int, member: int) -> list[int]:
    return [attempt + 1, number + 1, member]


def by_slime(recorder: TrajectoryRecorder) -> Take:
    """The hook for all samples."""

    def take(number: int, attempt: int) -> None:
        samples = [
            peers.SlimeSample([9, *_tokens(attempt, number, i)], 3, group_index=number, index=i) for i in range(2)
        ]
        slime.record(SimpleNamespace(), [samples], recorder=recorder)

    return take


def by_skyrl(recorder: TrajectoryRecorder) -> Take:
    """The wrapped generator."""

    def take(number: int, attempt: int) -> None:
        output = {"prompt_token_ids": [[9]] * 2, "response_ids": [_tokens(attempt, number, i) for i in range(2)]}
        output |= {"rewards": [0.0, 1.0], "loss_masks": [[1] * 3] * 2, "stop_reasons": ["stop"] * 2}
        output["trajectory_ids"] = [peers.Identity(str(number), i) for i in range(2)]
        generator = skyrl.RecordingGenerator(peers.Generator(output), recorder)
        asyncio.run(generator.generate({"batch_metadata": peers.Metadata(number)}))

    return take


def by_verl(recorder: TrajectoryRecorder) -> Take:
    """The sampler: half of the groups are sampled, the others cleared."""
    queue = peers.Queue()
    buffer = verl.recording(peers.Buffer, queue, recorder)(queue)

    def take(number: int, attempt: int) -> None:
        for i in range(2):
            queue.rows[f"{number}_{i}_0"] = peers.verl_row([9], _tokens(attempt, number, i), 1.0)
            buffer.partitions["train"][f"{number}_{i}_0"] = {"status": "success", "min_global_steps": 1}
        if number % 2:
            buffer._clear_groups("train", {str(number)})
        else:
            buffer.sample(number, "train", 1)
            buffer.partitions["train"].clear()

    return take


def by_areal(recorder: TrajectoryRecorder) -> Take:
    """The wrapped workflow."""

    def take(number: int, attempt: int) -> None:
        rows = [[9, *_tokens(attempt, number, i)] for i in range(2)]
        episodes = [peers.episode(row, [0, 1, 1, 1], [0, -1, -1, -1], [-1, 1, 1, 1], 1.0) for row in rows]
        workflow, data = areal.RecordingWorkflow(peers.Workflow(episodes), recorder), {"query_id": number}

        async def grouped() -> None:
            await asyncio.gather(*[workflow.arun_episode(None, data) for _ in range(2)])

        asyncio.run(grouped())

    return take


def by_async_grpo(recorder: TrajectoryRecorder) -> Take:
    """The queue of TRL's asynchronous trainer."""

    def take(number: int, attempt: int) -> None:
        inner: SimpleQueue[Any] = SimpleQueue()
        for i in range(2):
            rows = np.array([9, *_tokens(attempt, number, i)])
            inner.put(peers.RolloutSample([], [], rows, np.array([0, 1, 1, 1]), -np.ones(4), 0.0, 1, number, {}))
        queue = trl.RecordingQueue(inner, recorder)
        for _ in range(2):
            queue.get()

    return take


def by_grpo(recorder: TrajectoryRecorder) -> Take:
    """TRL's synchronous trainer, by the methods that `attach` wraps."""
    torch = __import__("torch")
    heard: dict[str, Any] = {}

    def sample(inputs: Any) -> Any:
        ids = heard["ids"]
        trainer._calculate_rewards(inputs, ["p"] * 2, ["", ""], ids)
        one = torch.ones(2, 1)
        return {"prompt_ids": 9 * one.long(), "prompt_mask": one, "advantages": torch.zeros(2)}

    trainer: Any = SimpleNamespace(
        _generate_and_score_completions=sample,
        _calculate_rewards=lambda *_: torch.ones(2, 1),
        _get_per_token_logps_and_entropies=None,
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        add_callback=lambda _: None,
        model=SimpleNamespace(training=True),
        num_generations=2,
        reward_weights=torch.ones(1),
        temperature=1.0,
    )
    recorder.attach(trainer, compute_log_probs=False)

    def take(number: int, attempt: int) -> None:
        heard["ids"] = [_tokens(attempt, number, i) for i in range(2)]
        trainer._generate_and_score_completions([{}, {}])

    return take


def by_nemo_gym(store: str) -> Take:
    """The sink; the same call is sent again, and is there once."""
    sink = nemo_gym.StoreCapture(store)

    def take(number: int, attempt: int) -> None:
        for i in range(2):
            asyncio.run(sink.put(peers.Entry(f"{number}", f"{i}", [9], _tokens(0, number, i), [-1.0] * 3)))

    return take


WAYS: dict[str, Callable[[TrajectoryRecorder], Take]] = {
    "slime": by_slime,
    "skyrl": by_skyrl,
    "verl": by_verl,
    "areal": by_areal,
    "trl": by_grpo,
    "trl_async": by_async_grpo,
}


def train(way: str, store: str, first: int, attempt: int, ahead: str) -> None:
    """Take the rollouts from `first` on, up to the one whose number is the size of the file `ahead`.

    So that it is not ahead of the one who kills it.
    """
    take = by_nemo_gym(store) if way == "nemo_gym" else WAYS[way](TrajectoryRecorder(store))
    for number in range(first, NUM):
        while number > Path(ahead).stat().st_size:
            time.sleep(0.0005)
        take(number, attempt)
        sys.stdout.write(f"{number} {0 if way == 'nemo_gym' else attempt}\n")
        sys.stdout.flush()
