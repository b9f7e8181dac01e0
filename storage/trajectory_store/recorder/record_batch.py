"""The columns of what a recorder is given, for all rows at once; one by one where something has to be encoded."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajectory_store.batch import Batch, batch_of, prepare
from trajectory_store.errors import BatchError
from trajectory_store.ragged import RaggedArray
from trajectory_store.recorder.raw_rollout import (
    LARGEST,
    ROUNDING,
    RawRollout,
    as_answer,
    as_failure,
    as_mode,
    as_prompt,
    check_text,
    ended,
    text_of,
    values_of,
)
from trajectory_store.recorder.row_encoder import Encoder, meta_text
from trajectory_store.schema import Column, Schema

FieldValues = Mapping[str, Sequence[Any]]
"""For the name of each record field, one value per row."""
Int64s = npt.NDArray[np.int64]


def as_list(value: Any) -> Any:
    """Return an array, a tensor or a tuple as a list, and anything else unchanged."""
    return value.tolist() if hasattr(value, "tolist") else list(value) if isinstance(value, tuple) else value


class RecordBatch:
    """The columns of the rows that one call records; the recorder adds their ids."""

    def __init__(self, fields: FieldValues, num: int, encoder: Encoder, sources: Sequence[Mapping[str, Any]]) -> None:
        self.num = num
        self.columns = _columns(fields, num, sources) if encoder.tokenizer is None or _is_encoded(fields) else None
        self._rows: list[dict[str, Any]] = []
        if self.columns is None:
            self._rows = [_row(fields, i, encoder, source) for i, source in enumerate(sources)]
            self.prompts = [row["input_ids"][: row["num_prompt_tokens"]] for row in self._rows]
            self.texts = [row["prompt"] for row in self._rows]
            self.lengths = np.array([len(row["input_ids"]) for row in self._rows], np.int64)
        else:
            flat, self.lengths = self.columns["input_ids"].values, self.columns["input_ids"].lengths
            begins = np.cumsum(self.lengths) - self.lengths
            sizes = self.columns["num_prompt_tokens"]
            self.prompts = [flat[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
            self.texts = self.columns["prompt"]

    def add(self, column: Column, values: Sequence[Any]) -> None:
        """Add a column: a value for each row; of a ragged one, as many items as its axis has, or None for no items.

        Of a column on the tokens' axis the values of a completion alone are those of its last tokens.
        """
        whole = column.axis is None or column.is_text
        if whole:
            column_rows: list[Any] = list(values)
        else:
            column_rows = [self._items(column, value, i) for i, value in enumerate(values)]
        if self.columns is None:
            for row, value in zip(self._rows, column_rows, strict=True):
                row[column.name] = value
        elif whole:
            self.columns[column.name] = column_rows if column.is_text else np.array(column_rows, column.np_dtype)
        else:
            sizes = np.array([len(value) for value in column_rows], np.int64)
            self.columns[column.name] = RaggedArray(np.concatenate(column_rows), sizes)

    def _items(self, column: Column, elements: Any, row: int) -> npt.NDArray[Any]:
        shape = (-1, *column.shape)
        row_values = np.asarray([] if elements is None else elements, column.np_dtype).reshape(shape)
        if column.axis != "tokens":
            return row_values
        length, whole = len(row_values), int(self.lengths[row])
        if length not in (0, whole, whole - len(self.prompts[row])):
            raise BatchError(
                f"{column.name} must contain one value per completion token: expected "
                f"{whole - len(self.prompts[row])}, got {length}."
            )
        return np.concatenate(
            [np.full((whole - length, *column.shape), column.fill_value, column.np_dtype), row_values]
        )

    def batch(self, schema: Schema) -> Batch:
        """Return the batch of a store."""
        if self.columns is None:
            return batch_of(schema, self._rows)
        return prepare(schema, {name: values for name, values in self.columns.items() if name in schema})


def _is_encoded(fields: FieldValues) -> bool:
    """Return True where nothing has to be encoded or decoded for a person to read."""
    texts = (fields.get("prompt"), fields.get("completion"))
    return "prompt_ids" in fields and "completion_ids" in fields and all(text and all(text) for text in texts)


def _row(fields: FieldValues, i: int, encoder: Encoder, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return one row; an error names the field that is wrong."""
    mine = {name: as_list(values[i]) for name, values in fields.items()}
    about = {"created_at": mine.get("created_at"), "meta": mine.get("meta") or {}}
    # TRL encodes a text prompt unchanged; messages go through the template.
    rollout = values_of({name: value for name, value in mine.items() if name != "meta"})
    rollout["finish_reason"], rollout["failure"] = ended(rollout.get("finish_reason", ""), rollout.get("failure", ""))
    return encoder.row(RawRollout(**{**rollout, **about, "as_chat": False}), source)


def _columns(fields: FieldValues, num: int, sources: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the columns of rows of token ids; None where a row has to be looked at by itself."""
    prompts, completions = _flat(fields.get("prompt_ids"), "iu"), _flat(fields.get("completion_ids"), "iu")
    if prompts is None or completions is None:
        return None
    (before, sizes), (completion_tokens, lengths) = prompts, completions
    whole = sizes + lengths
    for ids in (before, completion_tokens):
        if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
            return None
    if not whole.all():
        return None
    sampled = np.ones(len(completion_tokens), bool)
    if (masks := fields.get("completion_mask")) is not None:
        flat_scores = _flat(masks, "iub")
        if (
            flat_scores is None
            or not np.array_equal(flat_scores[1], lengths)
            or not np.isin(flat_scores[0], (0, 1)).all()
        ):
            return None
        sampled = flat_scores[0].astype(bool)
    place = np.arange(int(whole.sum())) - np.repeat(np.cumsum(whole) - whole, whole)
    is_said = place >= np.repeat(sizes, whole)
    ids = np.empty(len(place), np.int32)
    ids[~is_said], ids[is_said] = before, completion_tokens
    mask = np.zeros(len(place), bool)
    mask[is_said] = sampled
    columns: dict[str, Any] = {"input_ids": RaggedArray(ids, whole), "assistant_mask": RaggedArray(mask, whole)}
    for field, name in (("log_probs", "log_probs"), ("ref_log_probs", "ref_log_probs")):
        line = np.full(len(place), np.nan, np.float32)
        if (scores := fields.get(field)) is not None:
            flat_scores = _scores(scores, lengths)
            if flat_scores is None:
                return None
            flat_scores[~sampled] = np.nan
            with np.errstate(invalid="ignore"):
                if ((flat_scores > ROUNDING) | (flat_scores < -LARGEST)).any():
                    return None
            line[is_said] = flat_scores
        elif name == "ref_log_probs":
            continue
        columns[name] = RaggedArray(line, whole)
    numbers: dict[str, npt.NDArray[np.float64]] = {}
    for name in ("reward", "advantage", "temperature", "created_at"):
        values = _numbers(fields.get(name), num)
        if values is None:
            return None
        numbers[name] = values
    reward, advantage, heat = numbers["reward"], numbers["advantage"], numbers["temperature"]
    with np.errstate(invalid="ignore"):
        if (np.abs(reward) > LARGEST).any() or (np.abs(advantage) > LARGEST).any() or (heat < 0).any():
            return None
    ends = [
        ended(str(end or ""), as_failure(kind, "failure"))
        for end, kind in zip(
            fields.get("finish_reason") or [""] * num, fields.get("failure") or [""] * num, strict=True
        )
    ]
    failures = [kind for _, kind in ends]
    failed = np.array([bool(kind) for kind in failures])
    versions = _flat([fields["policy_version"]], "iu")
    if versions is None:
        return None
    given_prompts = [as_prompt(text, "prompt") if text else "" for text in fields.get("prompt") or [""] * num]
    texts = [check_text(text_of(text), "prompt") for text in given_prompts]
    said_texts = [text_of(as_prompt(text, "completion")) if text else "" for text in fields["completion"]]
    answers, metas = fields.get("answer") or [None] * num, fields.get("meta") or [None] * num
    meta_texts = [
        meta_text(
            answer=None if answers[i] is None else as_answer(as_list(answers[i]), "answer"),
            about=metas[i] or {},
            source=sources[i],
            messages=None if isinstance(given_prompts[i], str) else given_prompts[i],
            untrusted=float(reward[i]) if failed[i] and reward[i] == reward[i] else None,
        )
        for i in range(num)
    ]
    return columns | {
        "task_reward": np.where(failed, math.nan, reward).astype(np.float32),
        "advantage": np.where(failed, math.nan, advantage).astype(np.float32),
        "policy_version": versions[0].astype(np.int64),
        "temperature": numbers["temperature"].astype(np.float32),
        "log_prob_mode": [as_mode(mode or "", "log_prob_mode") for mode in fields.get("log_prob_mode") or [""] * num],
        "num_prompt_tokens": sizes.astype(np.int32),
        "created_at": numbers["created_at"],
        "finish_reason": [end for end, _ in ends],
        "failure_reason": failures,
        "reward_trusted": ~failed,
        "prompt": texts,
        "completion": said_texts,
        "meta": meta_texts,
    }


def _flat(rows: Sequence[Any] | None, kinds: str) -> tuple[npt.NDArray[Any], Int64s] | None:
    """Return the items of all rows, and how many each has; None where they are no whole numbers."""
    if rows is None or not len(rows):
        return None
    if all(isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in kinds for row in rows):
        return np.concatenate(rows), np.fromiter(map(len, rows), np.int64, len(rows))
    items = array("q")
    try:
        rows = [row if type(row) is list else as_list(row) for row in rows]
        for row in rows:
            items.fromlist(row)  # takes no fractions
    except (TypeError, OverflowError):
        return None
    return np.frombuffer(items, np.int64) if items else np.empty(0, np.int64), np.fromiter(map(len, rows), np.int64)


def _scores(rows: Sequence[Any], lengths: Int64s) -> npt.NDArray[np.float64] | None:
    """Return log-probs of all completion tokens, NaN where there is none; None where they do not fit."""
    sizes = lengths.tolist()
    if all(isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind == "f" for row in rows):
        return np.concatenate(rows, dtype=np.float64) if [len(row) for row in rows] == sizes else None
    filled = [[math.nan] * size if row is None else as_list(row) for row, size in zip(rows, sizes, strict=True)]
    if not all(isinstance(row, list) for row in filled) or [len(row) for row in filled] != sizes:
        return None
    items = array("d")
    for row in filled:
        try:
            items.fromlist(row)
        except TypeError:  # and no part of the row was taken
            try:
                items.fromlist([math.nan if item is None else item for item in row])
            except TypeError:
                return None
    return np.array(items, np.float64)


def _numbers(values: Sequence[Any] | None, num: int) -> npt.NDArray[np.float64] | None:
    if values is None:
        return np.full(num, np.nan)
    plain_numbers = [as_list(number) for number in values]
    if not all(value is None or type(value) in (int, float, bool) for value in plain_numbers):
        return None
    try:
        return np.array(plain_numbers, np.float64)
    except OverflowError:
        return None
