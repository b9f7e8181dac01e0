"""The processes that learn together: how they form a group, and the messages and files that they exchange."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

_CHUNK_BYTES: Final = 1 << 26
_LONGEST: Final = timedelta(days=1)
"""The first process may collect for a long time while the others wait."""


def join_group(device: str, meeting: Any = None) -> str:
    """Join the process group of `RANK` and `WORLD_SIZE` in the environment; return the device of this process."""
    if torch.device(device).type == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    backend = "nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=meeting,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=_LONGEST,
    )
    return device


def group_device() -> torch.device:
    """Return the device of the tensors that the group exchanges."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else torch.device("cuda", torch.cuda.current_device())


def send(message: dict[str, Any]) -> None:
    """Send a JSON-ready message from the first process to all others, which `receive` it."""
    content = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(group_device())
    dist.broadcast(torch.tensor([content.numel()], device=group_device()), src=0)
    dist.broadcast(content, src=0)


def receive() -> dict[str, Any]:
    """Wait for the first process to `send` a message."""
    size = torch.zeros(1, dtype=torch.int64, device=group_device())
    dist.broadcast(size, src=0)
    content = torch.zeros(int(size), dtype=torch.uint8, device=group_device())
    dist.broadcast(content, src=0)
    return json.loads(bytes(content.cpu().tolist()))


def collect_files(local: Path | None, into: Path) -> None:
    """Copy files of the other processes to a folder of the first one; every process must call this."""
    if dist.get_rank():
        files = [] if local is None else sorted(path for path in local.iterdir() if path.is_file())
        _send_bytes(json.dumps([(path.name, path.stat().st_size) for path in files]).encode())
        for path in files:
            with path.open("rb") as file:
                while part := file.read(_CHUNK_BYTES):
                    dist.send(_tensor(part), 0)
        return
    for rank in range(1, dist.get_world_size()):
        for name, size in json.loads(_receive_bytes(rank)):
            with (into / name).open("wb") as file:
                for start in range(0, size, _CHUNK_BYTES):
                    file.write(_received(min(_CHUNK_BYTES, size - start), rank))


def _send_bytes(content: bytes) -> None:
    dist.send(torch.tensor([len(content)], device=group_device()), 0)
    dist.send(_tensor(content), 0)


def _receive_bytes(rank: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64, device=group_device())
    dist.recv(size, rank)
    return _received(int(size), rank)


def _received(size: int, rank: int) -> bytes:
    content = torch.zeros(size, dtype=torch.uint8, device=group_device())
    dist.recv(content, rank)
    return content.cpu().numpy().tobytes()


def _tensor(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(group_device())
