"""TorchRL's storages."""

from __future__ import annotations

from pathlib import Path

from _stores import BATCH, TOKEN_COLUMNS

from _peers.base import LONGEST, Peer, edges_of


class LazyStack(Peer):
    """TensorDicts in RAM that refer to the tensors given; padded by the stack's own method."""

    name = "TorchRL LazyStackStorage (RAM)"
    needs = "torchrl"
    on_disk = False
    note = "keeps references in RAM and copies nothing"

    def create(self, path, rows):
        from torchrl.data import LazyStackStorage

        self.storage, self.at = LazyStackStorage(rows), 0

    def append(self, commit):
        import torch
        from tensordict import LazyStackedTensorDict, TensorDict

        lengths = commit["input_ids"].lengths.tolist()
        parts = {name: torch.from_numpy(commit[name].values).split(lengths) for name in TOKEN_COLUMNS}
        rows = [TensorDict({name: part[i] for name, part in parts.items()}, []) for i in range(len(lengths))]
        self.storage.set(range(self.at, self.at + len(rows)), LazyStackedTensorDict(*rows))
        self.at += len(rows)

    def count(self):
        return len(self.storage)

    def sample(self, rows):
        import torch

        stack = self.storage.get(torch.from_numpy(rows))
        return {name: stack.get(name, as_padded_tensor=True, padding_value=0) for name in TOKEN_COLUMNS}


class LazyMemmap(Peer):
    """Rows padded to the longest length there can be, and a length; read by index, cut to the longest row."""

    name = "TorchRL LazyMemmapStorage (padded)"
    needs = "torchrl"

    def create(self, path, rows):
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyMemmapStorage

        self.path, self.at = path, 0
        self.storage = LazyMemmapStorage(rows, scratch_dir=path)
        fields = {name: torch.zeros(BATCH, LONGEST, dtype=getattr(torch, d)) for name, d in TOKEN_COLUMNS.items()}
        self.buffer = TensorDict({**fields, "length": torch.zeros(BATCH, dtype=torch.int64)}, [BATCH])

    def append(self, commit):
        import torch

        edges = edges_of(commit)
        for name in TOKEN_COLUMNS:
            padded, values = self.buffer[name].zero_().numpy(), commit[name].values
            for i in range(BATCH):
                padded[i, : edges[i + 1] - edges[i]] = values[edges[i] : edges[i + 1]]
        self.buffer["length"].copy_(torch.from_numpy(commit["input_ids"].lengths))
        self.storage.set(range(self.at, self.at + BATCH), self.buffer)
        self.at += BATCH

    def close(self):
        self.storage.dumps(self.path)

    def open(self, path, rows):
        from torchrl.data import LazyMemmapStorage

        self.storage = LazyMemmapStorage(rows, scratch_dir=path, existsok=True)
        self.storage.loads(path)

    def count(self):
        return len(self.storage)

    def sample(self, rows):
        import torch

        batch = self.storage.get(torch.from_numpy(rows))
        width = int(batch["length"].max())
        return {name: batch[name][:, :width] for name in TOKEN_COLUMNS}

    def salvage(self, path: Path) -> int:
        """Rows with a length in the raw files, which `TensorDict.load_memmap` opens."""
        from tensordict import TensorDict

        return int((TensorDict.load_memmap(path)["length"] > 0).sum())
