"""The trajectories of a run as arrays and text, whatever columns its store has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.filters import masks_known
from rlhf_pipeline.errors import DataError
from rlhf_pipeline.run.address import Address
from trajectory_store import TrajectoryStore

Ids = npt.NDArray[np.int64]

_BLOCK_ROWS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The further arguments of a trajectory's reward function, from the column `meta`."""

    answer: Any
    """A JSON value."""
    prompt_meta: dict[str, object]
    error: str | None
    """The reason why it failed, or None."""
    messages: list[dict[str, Any]] | None
    """The messages of the prompt, if it consists of messages."""
    graded: dict[str, Any]
    """Further inputs of reward functions, such as a conversation: fields of `Sampled`."""


class Stored:
    """Reads the columns of a store."""

    def __init__(self, path: Address, *, copies: bool = False) -> None:
        self.path = path
        self.store: Any = TrajectoryStore.open(path, mode="r", io="pread" if copies else "auto")
        self.columns = {column.name: column for column in self.store.schema}

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.close()

    def blocks(self) -> Iterator[Ids]:
        """Yield the ids of all trajectories in blocks, small enough that their texts take little memory."""
        for block in self.store.batches(_BLOCK_ROWS, []):
            yield block["ids"]

    def scalars(self, name: str, ids: Ids | None = None) -> npt.NDArray[Any] | None:
        """Return one value per trajectory, or None if the store has no such column, or has it per token."""
        column = self.columns.get(name)
        return None if column is None or column.axis is not None else self.store.read_scalars(name, ids)

    def texts(self, name: str, ids: Ids) -> list[str]:
        """Return a text column; empty texts if the store has no such column."""
        return self.store.read(ids, [name])[name] if name in self.columns else [""] * len(ids)

    def rows(self, name: str, ids: Ids) -> list[npt.NDArray[Any]] | None:
        """Return a ragged column as one array per trajectory, or None if the store has no such column."""
        return list(self.store.read(ids, [name])[name]) if name in self.columns else None

    def sampled(self, ids: Ids) -> list[tuple[list[int], list[bool]]]:
        """Return the tokens of rows, and which the policy sampled: with an unknown mask, all after the prompt."""
        tokens, masks = self.rows("input_ids", ids), self.rows("assistant_mask", ids)
        starts = self.scalars("num_prompt_tokens", ids)
        if tokens is None or starts is None:
            return [([], [])] * len(ids)
        is_known = masks_known(self.store, ids)
        rows: list[tuple[list[int], list[bool]]] = []
        for i, (row, start) in enumerate(zip(tokens, starts.tolist(), strict=True)):
            after_prompt = np.arange(len(row)) >= start
            mask = after_prompt if masks is None or not is_known[i] else masks[i].astype(np.bool_)
            rows.append((row.tolist(), mask.tolist()))
        return rows

    def contexts(self, ids: Ids) -> list[Context]:
        """Return the contents of `meta`; equal texts are parsed once."""
        parsed: dict[str, Context] = {}
        contexts: list[Context] = []
        for row, text in zip(ids, self.texts("meta", ids), strict=True):
            context = parsed.get(text)
            if context is None:
                context = parsed[text] = _context(text, int(row), self.path)
            contexts.append(context)
        return contexts


def _context(text: str, row: int, path: Address) -> Context:
    if not text:
        return Context(answer=None, prompt_meta={}, error=None, messages=None, graded={})
    try:
        data: Any = json.loads(text)
    except ValueError as error:
        raise DataError(
            f"{path}: column `meta`: the value of trajectory {row} is not JSON ({error}): {text[:60]!r}"
        ) from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: column `meta`: the value of trajectory {row} is not a JSON object: {text[:60]!r}")
    answer, meta, failure = data.get("answer"), data.get("prompt"), data.get("error")
    talk, messages = data.get("graded") or {}, data.get("messages")
    if talk:
        talk |= {"conversation": messages, "turns": len(data["turn_rewards"])}
        talk |= {"call_errors": data.get("call_errors", 0)}
        messages = None
    elif "prompt_text" in data:
        talk = {"prompt_text": data["prompt_text"]}
    return Context(
        answer=answer,
        prompt_meta=meta if isinstance(meta, dict) else {},
        error=None if failure is None else str(failure),
        messages=messages if isinstance(messages, list) else None,
        graded=talk,
    )
