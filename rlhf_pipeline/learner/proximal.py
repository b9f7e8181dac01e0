"""The proximal policy: what a trajectory's ratio is taken against where the loss corrects the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


class ProximalLogProbs:
    """The trainer's own log-probs of trajectories, taken before the first step that uses each, and frozen from then on.

    Taken again at every step they would be those of the policy itself: every ratio would be 1 and the clip inert. They
    are part of a checkpoint, so a resumed run goes on with the same ones.

    >>> held = ProximalLogProbs()
    >>> held.put(7, torch.tensor([-1.0, -2.0]))
    >>> held.missing(np.array([7, 8])).tolist(), held.row(7).tolist()
    ([False, True], [-1.0, -2.0])
    """

    def __init__(self) -> None:
        self._values: dict[int, Tensor] = {}

    def missing(self, row_ids: Ints) -> npt.NDArray[np.bool_]:
        """Which rows have none yet, bool `[n]`."""
        return np.fromiter((row not in self._values for row in row_ids.tolist()), bool, len(row_ids))

    def put(self, row_id: int, values: Tensor) -> None:
        """Keep a row's log-probs, float32 `[assistant tokens]`, on the host."""
        self._values[row_id] = values.detach().float().cpu().clone()

    def row(self, row_id: int) -> Tensor:
        """A row's log-probs, float32 `[assistant tokens]`."""
        return self._values[row_id]

    def row_ids(self) -> Ints:
        """The rows that are held, int64 `[n]`."""
        return np.fromiter(self._values, np.int64, len(self._values))

    def forget(self, row_ids: Iterable[int]) -> None:
        """Drop rows that no step asks for again."""
        for row in row_ids:
            del self._values[int(row)]

    def state_tensors(self) -> dict[str, Tensor]:
        """What is held, for a checkpoint: row ids, lengths, and the values end to end."""
        values = list(self._values.values())
        return {
            "row_ids": torch.from_numpy(self.row_ids()),
            "lengths": torch.tensor([len(row) for row in values], dtype=torch.int64),
            "log_probs": torch.cat(values) if values else torch.zeros(0),
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `state_tensors` returned, in place of what is held."""
        self._values = {}
        if tensors:
            parts = tensors["log_probs"].split(tensors["lengths"].tolist())
            self._values = dict(zip(tensors["row_ids"].tolist(), (part.clone() for part in parts), strict=True))
