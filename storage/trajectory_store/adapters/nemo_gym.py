"""NeMo-Gym 0.7: every call of a model, stored before its answer goes to the harness.

    env.nemo_gym.token_id_capture:
      enabled: true
      sink: trajectory_store.adapters.nemo_gym:StoreCapture
      sink_kwargs: {store: runs/gym/store}
      lineage_store: trajectory_store.adapters.nemo_gym:StoreCapture
      lineage_store_kwargs: {store: runs/gym/store}

Source: `TokenSink`, `TokenSource` and `LineageResolver` of `nemo_gym/token_id_capture/protocols.py` (nemo-gym 0.7.0),
whose `conformance.py` passes. A call is a row; what is dropped stays, with a row that records it.
"""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajectory_store import extras
from trajectory_store.recorder.row_encoder import meta_text
from trajectory_store.recorder.source_ids import alone, open_or_create
from trajectory_store.recorder.standard import FAILURES, standard_schema
from trajectory_store.schema import Column

_PUT, _MARK, _DROPPED, _BEGIN = "put", "mark", "dropped", "begin"
_COLUMNS = tuple(Column(name, "str", fill="") for name in ("capture_kind", "rollout_id", "call_id", "capture_payload"))


class StoreCapture:
    """Sink, source and lineage in one; any number of processes may have one over the same store."""

    def __init__(self, store: str | Path, *, durability: Any = "power") -> None:
        self.path = Path(store).expanduser()
        self.store = open_or_create(self.path, standard_schema([*FAILURES, *_COLUMNS]), durability)
        self._lock = threading.Lock()
        self._read_rows: set[int] = set()
        self._events: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
        """For each rollout, the kind, call and row of each event."""

    async def put(self, entry: Any) -> None:
        """Store a call durably; again with the same payload is nothing, with another one an error."""
        await asyncio.to_thread(self._put, entry)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Store that a call is made, before it is."""
        await asyncio.to_thread(self._append, _BEGIN, rollout_id, model_call_id)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Store that a call of a rollout was not captured."""
        await asyncio.to_thread(self._append, _MARK, rollout_id, model_call_id)

    async def freeze(self, rollout_id: str) -> Any:
        """Return what is stored of a rollout, and whether something is missing."""
        protocols = extras.load("nemo_gym.token_id_capture.protocols", "NeMo-Gym's capture")
        entry = extras.load("nemo_gym.token_id_capture.records", "NeMo-Gym's capture").TokenEntry
        with self._lock:
            events = self._of(rollout_id)
            puts = {call: self._payload(row) for kind, call, row in events if kind == _PUT}
        begun = {call for kind, call, _ in events if kind == _BEGIN}
        marked = any(kind == _MARK for kind, _, _ in events)
        entries = tuple(entry.model_validate(json.loads(text)) for text in puts.values())
        snapshot = hashlib.sha256(repr(puts).encode()).hexdigest()
        moved = sum(kind != _DROPPED for kind, _, _ in events)
        return protocols.TokenCaptureSnapshot(rollout_id, entries, marked or bool(begun - puts.keys()), snapshot, moved)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Record that a snapshot was consumed; its rows stay in the store for inspection and learning."""
        now = await self.freeze(rollout_id)
        if (now.snapshot_id, now.version) != (snapshot_id, version):
            return False
        await asyncio.to_thread(self._append, _DROPPED, rollout_id, "")
        return True

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """Return which call a request continues from."""
        lineage = extras.load("nemo_gym.token_id_capture.lineage", "NeMo-Gym's capture").RolloutLineage()
        for entry in (await self.freeze(rollout_id)).entries:
            lineage.add_entry(entry)
        return lineage.resolve(request_items)

    def is_process_shared(self) -> bool:
        """Return True: what one process has stored another one resolves."""
        return True

    async def close(self) -> None:
        """Close the store; what is in it stays."""
        if not self.store.closed:
            self.store.close()

    def _put(self, entry: Any) -> None:
        payload = json.dumps(entry.model_dump(mode="json"), sort_keys=True)
        with self._lock, alone(self.path):
            for kind, call, row in self._of(entry.rollout_id):
                if kind == _PUT and call == entry.model_call_id:
                    if self._payload(row) == payload:
                        return
                    raise ValueError(f"call {call} of {entry.rollout_id} is already stored with a different payload.")
            prompt, completion = entry.prompt_token_ids, entry.generation_token_ids
            self._write(
                _PUT, entry.rollout_id, entry.model_call_id, payload, prompt, completion, entry.generation_log_probs
            )

    def _append(self, kind: str, rollout: str, call: str) -> None:
        with self._lock, alone(self.path):
            self._write(kind, rollout, call, "", (), (), ())

    def _write(
        self,
        kind: str,
        rollout: str,
        call: str,
        payload: str,
        prompt: Sequence[int],
        completion: Sequence[int],
        scores: Any,
    ) -> None:
        name = f"{rollout}/{call}"  # by which `TrajectoryRecorder.give_rewards` gives the call its reward
        source = {"recorder": "nemo-gym", "rollout": rollout} | ({"name": name} if kind == _PUT else {})
        self.store.append(
            {
                "input_ids": [np.array([*prompt, *completion], np.int32)],
                "assistant_mask": [np.array([False] * len(prompt) + [True] * len(completion))],
                "log_probs": [np.array([np.nan] * len(prompt) + list(scores), np.float32)],
                "num_prompt_tokens": [len(prompt)],
                "policy_version": [-1],
                "meta": [meta_text(answer=None, about={}, source=source)],
                "capture_kind": [kind],
                "rollout_id": [rollout],
                "call_id": [call],
                "capture_payload": [payload],
            }
        )

    def _of(self, rollout: str) -> list[tuple[str, str, int]]:
        """Return the events of a rollout, those of other processes too."""
        self.store.refresh()
        ids = self.store.ids()
        new = list(itertools.takewhile(lambda row: row not in self._read_rows, map(int, ids[::-1])))[::-1]
        if len(self._read_rows) + len(new) != len(ids):  # some are not the newest, or are evicted
            self._read_rows.intersection_update(ids.tolist())
            new = [row for row in ids.tolist() if row not in self._read_rows]
        if new:
            new_events = self.store.read(np.array(new), ["capture_kind", "rollout_id", "call_id"])
            for row, kind, of, call in zip(new, *new_events.values(), strict=True):
                self._events[of].append((kind, call, row))
            self._read_rows.update(new)
        return list(self._events[rollout])

    def _payload(self, row: int) -> str:
        return self.store.read(np.array([row]), ["capture_payload"])["capture_payload"][0]
