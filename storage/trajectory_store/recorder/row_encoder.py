"""The row of a store that a record becomes, with its text encoded."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.errors import BatchError, SchemaError
from trajectory_store.recorder.raw_rollout import RawRollout, check_text, text_of
from trajectory_store.recorder.text_codec import decode, encode_prompt, encode_text, load_tokenizer

_JSON = json.JSONEncoder(ensure_ascii=False, default=str, allow_nan=False)


class Encoder:
    """Makes rows of a store of rollouts, and token ids of their text; no token is added to a completion.

    `tokenizer` is one of transformers, or its folder or hub name; without it every rollout must bring its token ids.
    `chat` puts text prompts through its template.
    """

    def __init__(self, tokenizer: Any | None, *, chat: bool = True) -> None:
        is_name = isinstance(tokenizer, (str, Path))
        self.name = str(tokenizer if is_name else getattr(tokenizer, "name_or_path", "")) or "given"
        self.tokenizer = load_tokenizer(self.name) if is_name else tokenizer
        self.chat = chat
        self._last: tuple[Any, tuple[list[int], bool]] | None = None

    def row(self, record: RawRollout, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a record, apart from its ids; `meta` records what was encoded, and `source`."""
        encoded: dict[str, Any] = {}
        prompt_ids, completion_ids = record.prompt_ids, record.completion_ids
        prompt, completion = text_of(record.prompt), record.completion
        if completion_ids is None:
            for name in ("completion_mask", "log_probs", "ref_log_probs"):
                if getattr(record, name) is not None:
                    raise BatchError(
                        f"the row has values per token ({name}) but no token ids for the completion, whose text may be "
                        f"encoded as different tokens. Export the ids too, or ignore the values: --field {name}=none"
                    )
        if prompt_ids is None:
            prompt_ids, templated = self._prompt(record)
            encoded["prompt"] = "chat template" if templated else "text"
        if completion_ids is None:
            completion_ids = self._completion(completion)
            encoded["completion"] = "text"
        if self.tokenizer is not None and not encoded:
            prompt, completion = prompt or self._decode(prompt_ids), completion or self._decode(completion_ids)
        if not len(prompt_ids) and not len(completion_ids):
            raise BatchError("neither the prompt nor the completion has any tokens.")
        start = len(prompt_ids)
        ids = np.concatenate([np.asarray(prompt_ids, np.int64), np.asarray(completion_ids, np.int64)])
        mask = np.zeros(len(ids), bool)
        mask[start:] = _per_token(record.completion_mask, [True] * len(completion_ids), "completion_mask")
        mask &= record.mask_known
        row = {
            "input_ids": ids,
            "log_probs": _scores(record.log_probs, mask, start, "log_probs"),
            "task_reward": math.nan if record.failure else record.reward,
            "policy_version": record.policy_version,
            "temperature": record.temperature,
            "log_prob_mode": record.log_prob_mode,
            "num_prompt_tokens": start,
            "created_at": record.created_at,
            "finish_reason": record.finish_reason,
            "prompt": prompt,
            "completion": completion,
            "meta": meta_text(
                answer=record.answer,
                about=record.meta,
                source=source,
                encoded={"tokenizer": self.name, **encoded} if encoded else None,
                messages=None if isinstance(record.prompt, str) else record.prompt,
                untrusted=record.reward if record.failure and record.reward == record.reward else None,
            ),
        }
        if record.mask_known:  # else the column is absent: unknown, which is not the same as not sampled
            row["assistant_mask"] = mask
        if record.ref_log_probs is not None:
            row["ref_log_probs"] = _scores(record.ref_log_probs, mask, start, "ref_log_probs")
        if record.evaluation:
            row["evaluation"] = True
        if record.failure:
            row |= {"failure_reason": record.failure, "reward_trusted": False}
        elif record.advantage == record.advantage:
            row["advantage"] = record.advantage
        return row

    def _need(self) -> Any:
        if self.tokenizer is None:
            raise SchemaError(
                "the rows have text but no token ids. Specify the tokenizer of the model that you will train on them: "
                "--tokenizer FOLDER, or TrajectoryRecorder(tokenizer=FOLDER). FOLDER is a checkpoint; `rlhf-pipeline "
                "new-model FOLDER --text FILE` creates a small one."
            )
        return self.tokenizer

    def _prompt(self, record: RawRollout) -> tuple[list[int], bool]:
        key = (record.prompt, record.as_chat)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        tokenizer = self._need()
        as_chat, is_text = self.chat and record.as_chat, isinstance(record.prompt, str)
        templated = not is_text or (as_chat and getattr(tokenizer, "chat_template", None) is not None)
        try:
            encoded = encode_prompt(tokenizer, record.prompt, as_chat=as_chat), templated
        except SchemaError as error:  # the template and this row do not go together
            raise BatchError(str(error)) from error
        self._last = (key, encoded)
        return encoded

    def _completion(self, text: str) -> list[int]:
        tokenizer = self._need()
        ids = encode_text(tokenizer, text, add_special_tokens=False)
        end = getattr(tokenizer, "eos_token_id", None)
        turns = sum(a == end != b for a, b in itertools.pairwise(ids)) + 1
        if turns > 1 and end is not None:
            raise BatchError(
                f"the text of the completion has {turns} turns (the end token occurs within it), but the file does "
                "not record which turns came from an environment. Export the token ids and their mask."
            )
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        return decode(self.tokenizer, ids)


def _per_token(token_values: Sequence[Any] | None, default: Sequence[Any], name: str) -> Sequence[Any]:
    if token_values is not None and len(token_values) != len(default):
        raise BatchError(
            f"{name} must contain one value per completion token: expected {len(default)}, got {len(token_values)}."
        )
    return default if token_values is None else token_values


def _scores(scores: Sequence[Any] | None, mask: Any, start: int, name: str) -> npt.NDArray[np.float32]:
    line = np.full(len(mask), np.nan, np.float32)
    line[start:] = [math.nan if s is None else s for s in _per_token(scores, [None] * (len(mask) - start), name)]
    line[~mask] = np.nan
    return line


def meta_text(
    *,
    answer: str | None,
    about: Mapping[str, Any],
    source: Mapping[str, Any],
    encoded: Mapping[str, Any] | None = None,
    messages: Any = None,
    untrusted: float | None = None,
) -> str:
    """Return the JSON of the column `meta`: the answer, the other fields of the row, chat messages, the source."""
    meta: dict[str, Any] = {"answer": answer, "prompt": about, "source": source}
    if untrusted is not None:
        meta["untrusted_reward"] = untrusted
    if encoded is not None:
        meta["encoded"] = encoded
    if messages is not None:
        meta["messages"] = messages
    try:
        text = _JSON.encode(meta)
    except ValueError:  # NaN, which JSON does not have, becomes null
        finite = json.loads(json.dumps(meta, default=str), parse_constant=lambda name: None)
        text = json.dumps(finite, ensure_ascii=False)
    try:
        return check_text(text, "meta")
    except BatchError:
        for name, value in about.items():  # name the one
            check_text(json.dumps({name: value}, ensure_ascii=False, default=str), name)
        raise
