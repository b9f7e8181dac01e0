"""What the transforms of the write path share: TensorDicts are taken apart at the door, the work is on flat columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import Composite, Unbounded
from torchrl.envs.transforms import Transform

from rlhf_pipeline.data.keys import Key
from rlhf_pipeline.data.trajectories import Flat, Trajectories, attach, columns_of, put, ragged_tokens, token_level


class ColumnTransform(Transform):
    """A transform that adds columns to trajectories and leaves the rest as it is."""

    @abstractmethod
    def new_columns(self, batch: Trajectories, *, writing: bool) -> dict[Key, Flat]:
        """The columns that a batch gets.

        Args:
            batch: trajectories; it is not changed.
            writing: whether the batch is on the write path, and not in an environment or read from a store.
        """

    def prepared(self, td: TensorDictBase) -> TensorDictBase:
        """A TensorDict `[n]` that can be taken apart; a place to encode what is no column yet."""
        return td

    def is_done(self, td: TensorDictBase) -> bool:
        """Whether a TensorDict has all the columns, so that it need not be taken apart."""
        del td
        return False

    def write(self, batch: Trajectories) -> Trajectories | None:
        """The batch on its way to the store, with the new columns."""
        return Trajectories(batch.n, batch | self.new_columns(batch, writing=True))

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The batch with the new columns, in its form; the input is not changed."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None or in_environment(self):
            return tensordict
        return self._fill(tensordict, writing=True)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set the new columns of a batch that has not been through the transform, in the batch itself.

        Args:
            tensordict: trajectories in any of the forms of the write path, or a sampled batch.

        Returns:
            The batch that was passed, with the columns in its form.
        """
        if tensordict is None:  # pyright: ignore[reportUnnecessaryComparison]
            return tensordict
        return put(tensordict, self._fill(tensordict, writing=False))

    def _fill(self, td: TensorDictBase, *, writing: bool) -> TensorDictBase:
        if td.batch_dims == 0:
            return self._fill(lazy_stack([td]), writing=writing)[0]  # pyright: ignore[reportReturnType,reportArgumentType]
        if self.is_done(td):
            return td
        td = token_level(self.prepared(td))
        return attach(td, self.new_columns(ragged_tokens(columns_of(td)), writing=writing))


def in_environment(transform: Transform) -> bool:
    """Whether a transform belongs to an environment, whose actions are no trajectories to write."""
    try:
        return transform.container is not None
    except ValueError:  # a Compose that belongs to none
        return False


def declare_per_token(output_spec: Composite, observed: Sequence[Key], rewards: Sequence[Key] = ()) -> Composite:
    """Declare observations and rewards with one value per token, as an environment that samples whole completions has.

    Args:
        output_spec: of the environment; it is changed.
        observed: keys as they are inside `next`.
        rewards: the same.
    """
    shape: Any = (*output_spec.shape, -1)
    spec: Any = Unbounded(shape=shape, device=output_spec.device, dtype=torch.float32)  # pyright: ignore[reportArgumentType]
    for name, keys in (("full_observation_spec", observed), ("full_reward_spec", rewards)):
        if keys and name not in output_spec.keys():  # noqa: SIM118  # a Composite is no dict
            output_spec[name] = Composite(shape=output_spec.shape)
        for key in keys:
            output_spec[name, *((key,) if isinstance(key, str) else key)] = spec.clone()
    return output_spec


def in_next(key: Key) -> Key:
    """A key as a step of an environment calls it inside `next`."""
    if isinstance(key, str) or key[0] != "next":
        return key
    return key[1] if len(key) == 2 else key[1:]
