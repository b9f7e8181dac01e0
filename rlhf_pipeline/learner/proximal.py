"""The proximal policy, against which a trajectory's ratio is taken if the loss corrects for the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


class ProximalLogProbs:
    """The trainer's own log-probs of trajectories, computed before the first step that may use them, and then frozen.

    Computed at the step that uses a trajectory, they would be those of the policy itself: every ratio would be 1, and
    the clip without effect. So a phase of several steps, each on a part of a rollout, scores all of it at its start.
    They are part of a checkpoint, so a resumed run continues with the same ones.

    >>> held = ProximalLogProbs()
    >>> held.put(7, torch.tensor([-1.0, -2.0]))
    >>> held.missing(np.array([7, 8])).tolist(), held.row(7).tolist()
    ([False, True], [-1.0, -2.0])
    """

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}

    def missing(self, row_ids: Ints) -> npt.NDArray[np.bool_]:
        """Return which rows have none yet, bool `[n]`."""
        return np.fromiter((row not in self._values for row in row_ids.tolist()), bool, len(row_ids))

    def put(self, row_id: int, values: Tensor) -> None:
        """Keep a row's log-probs, float32 `[assistant tokens]`, on the host."""
        self._values[row_id] = values.detach().float().cpu().clone()

    def row(self, row_id: int) -> Tensor:
        """Return a row's log-probs, float32 `[assistant tokens]`."""
        return self._values[row_id]

    def row_ids(self) -> Ints:
        """Return the rows that are held, int64 `[n]`."""
        return np.fromiter(self._values, np.int64, len(self._values))

    def forget(self, row_ids: Iterable[int]) -> None:
        """Drop rows that no later step needs."""
        for row in row_ids:
            del self._values[int(row)]

    def state_tensors(self) -> dict[str, Tensor]:
        """Return everything held, for a checkpoint: row ids, lengths, and the values end to end."""
        values = list(self._values.values())
        return {
            "row_ids": torch.from_numpy(self.row_ids()),
            "lengths": torch.tensor([len(row) for row in values], dtype=torch.int64),
            "log_probs": torch.cat(values) if values else torch.zeros(0),
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned, replacing everything held."""
        self._values = {}
        if tensors:
            parts = tensors["log_probs"].split(tensors["lengths"].tolist())
            self._values = dict(zip(tensors["row_ids"].tolist(), (part.clone() for part in parts), strict=True))
