"""A program of a user, which type checkers read in their strictest form, and the test runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store import RaggedArray, TrajectoryRecorder, TrajectoryStore


class Tensor:
    """What a tensor of any library has of an array."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values.tolist()

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        return Tensor(np.asarray(self.values[index]))


def main(folder: str) -> None:
    """Record lists, arrays and tensors, and read them by every kind of key."""
    ids = np.array([[1, 2], [1, 2]], np.int64)
    with TrajectoryRecorder(folder, group_size=2) as recorder:
        recorder.record(
            prompt_ids=Tensor(ids), completions=["", ""], completion_ids=ids, rewards=np.array([1.0, 0.0], np.float32)
        )
        recorder.record(
            prompt_ids=[Tensor(row) for row in ids],
            completions=["", ""],
            completion_ids=[row for row in ids],  # noqa: C416 # a list of arrays
            log_probs=[np.array([-0.1, -0.2], np.float32), None],
            rewards=[np.float32(1.0), None],
            completion_masks=[[True, False], [True, True]],
            policy_version=np.array([3, 4]),
            token_versions=np.array([[3, 3], [4, 5]]),
            named_rewards={"style": np.array([0.5, 0.5])},
        )
        sys.stdout.write(f"{recorder!r}\n")
    with TrajectoryStore.open(folder) as store:
        row: dict[str, Any] = store[-1]
        some: dict[str, Any] = store[0:2]
        picked: dict[str, Any] = store[np.array([True, False, True, False])]
        several: dict[str, Any] = store[["task_reward", "prompt"]]
        rewards: npt.NDArray[np.float32] = store["task_reward"]
        tokens: RaggedArray = store[0:2, "input_ids"]
        assert len(row) == len(some) == len(picked)
        assert len(several) == 2
        assert rewards[:3].tolist() == [1.0, 0.0, 1.0]
        assert len(tokens) == 2
        sys.stdout.write(f"{store['policy_version'].tolist()}\n")


if __name__ == "__main__":
    main(sys.argv[1])
