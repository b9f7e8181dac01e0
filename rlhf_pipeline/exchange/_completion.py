"""One completion as another tool gives it, checked; and the row of a store that it becomes, with its text encoded."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.buffer.filters import seconds_of
from rlhf_pipeline.data.rewards import LARGEST
from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, did_you_mean

Row = Mapping[str, Any]
"""One row of a file, as JSON or Arrow gives it."""
Messages = Sequence[Mapping[str, Any]]

ROUNDING = 1e-4
"""A log-prob may lie above 0 by this much, where an engine rounds."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One completion of one prompt. Where token ids are given they are kept."""

    prompt: str | Messages = ""
    """Text or chat messages; empty where only token ids are known."""
    completion: str = ""
    prompt_ids: Sequence[int] | None = None
    completion_ids: Sequence[int] | None = None
    completion_mask: Sequence[bool] | None = None
    """Which completion tokens the policy produced; None for all of them."""
    log_probs: Sequence[float | None] | None = None
    """Behaviour log-probs, one per completion token; None where unknown."""
    ref_log_probs: Sequence[float | None] | None = None
    reward: float = math.nan
    advantage: float = math.nan
    group: tuple[Any, ...] | None = None
    """Names the instance of the prompt within its file; None groups consecutive rows with equal prompts."""
    policy_version: int = 0
    finish_reason: str = ""
    answer: str | None = None
    created_at: float = math.nan
    as_chat: bool = True
    """A text prompt goes through the tokenizer's chat template, where it has one."""
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Other fields of the row, JSON-ready."""


# -- values of fields: each function returns what a rollout has, or raises a DataError that names the field ------------


def shown(value: Any) -> str:
    """Return a value as an error message shows it: its type, and its beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python does not spell out integers of more than a few thousand digits
        text = f"of {value.bit_length():,} bits"
    return f"{type(value).__name__} {text[:57] + '...' if len(text) > 60 else text}"


def is_messages(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Return True for a list of chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def message_text(message: Mapping[str, Any]) -> str:
    """Return what one chat message says; the text parts of a content that is a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def text_of(value: str | Messages) -> str:
    r"""Return a prompt or completion as text for people: one message is its content, more are marked by role.

    >>> text_of([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}])
    '[system]\nBe brief.\n\n[user]\n1+1'
    """
    if isinstance(value, str):
        return value
    if len(value) == 1:
        return message_text(value[0])
    return "\n\n".join(f"[{message.get('role')}]\n{message_text(message)}" for message in value)


def check_text(text: str, name: str) -> str:
    """Return `text` if it can be written as UTF-8, which half of a surrogate pair cannot, though JSON can spell it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise DataError(f"field '{name}' holds half of a surrogate pair ({half}), which is not text.") from None
    return text


def as_prompt(value: Any, name: str) -> str | Messages:
    """Return text, or chat messages as they are."""
    if not isinstance(value, str) and not is_messages(value):
        raise DataError(f"field '{name}' must be text or chat messages, got {shown(value)}.")
    check_text(text_of(value), name)
    return value


def as_text(value: Any, name: str) -> str:
    """Return text, or what the chat messages of one completion say."""
    return text_of(as_prompt(value, name))


_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Fields of a message, beside its content, of what the policy produced."""


def check_is_text(messages: Messages, name: str, *, sampled: bool) -> None:
    """Refuse messages that say more than their text: without token ids, the rest would be lost."""
    roles = ", ".join(str(message.get("role")) for message in messages)
    if sampled and len(messages) > 1:
        raise DataError(
            f"field '{name}' holds {len(messages)} messages ({roles}) and no token ids; which of its "
            "tokens the policy produced cannot be told from the text. Export the token ids too."
        )
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [] if content is None else [{"text": content}]
        more = [part for part in parts if not isinstance(part, dict) or not isinstance(part.get("text"), str)]
        more += [{key: message[key]} for key in _BESIDE_CONTENT if sampled and message.get(key)]
        if more:
            raise DataError(
                f"field '{name}' holds more than text and no token ids: {shown(more[0])}. It would be lost when the "
                "text is encoded. Export the token ids too."
            )


def as_number(value: Any, name: str) -> float:
    """Return a float; True is 1.0 and null is NaN."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value.strip().lower() in ("nan", "infinity", "-infinity", "inf", "-inf"):
        return float(value)
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            raise DataError(f"field '{name}' must be a number of reasonable size, got {shown(value)}.") from None
    raise DataError(f"field '{name}' must be a number, got {shown(value)}.")


def as_reward(value: Any, name: str) -> float:
    """Return a reward or an advantage: a finite float32, or NaN where there is none."""
    reward = as_number(value, name)
    if not (abs(reward) <= LARGEST or reward != reward):
        raise DataError(
            f"field '{name}' must be finite and at most {LARGEST:.4g} in size (float32), got {shown(value)}. "
            "Write null where there is no reward."
        )
    return reward


def as_advantage(value: Any, name: str) -> float:
    """Return an advantage: a number, or the one that all of a list are, apart from nulls."""
    if not isinstance(value, list):
        return as_reward(value, name)
    found = {number for number in (as_reward(item, name) for item in value) if number == number}
    if len(found) > 1:
        raise DataError(
            f"field '{name}' differs between tokens ({', '.join(f'{number:g}' for number in sorted(found)[:3])}), and "
            "a trajectory has one advantage. Leave it out: --field advantage=none"
        )
    return found.pop() if found else math.nan


def as_int(value: Any, name: str) -> int:
    """Return an int of 64 bits; digits in quotes are taken as the number that they spell."""
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 30:
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"field '{name}' must be a whole number, got {shown(value)}.")
    if not abs(value) <= 2**63 - 1:
        raise DataError(f"field '{name}' must be a whole number of at most {2**63 - 1}, got {shown(value)}.")
    return value


_LAST_SECOND = 253_402_300_799


def as_time(value: Any, name: str) -> float:
    """Return seconds since 1970: a number, a date and time of Arrow's, or one in text."""
    if isinstance(value, (str, datetime.datetime)):
        try:
            return seconds_of(value)
        except ValueError:
            raise DataError(
                f"field '{name}' must be seconds or a date such as 2026-01-31, got {shown(value)}."
            ) from None
    seconds = as_number(value, name)
    if abs(seconds) > _LAST_SECOND:
        raise DataError(
            f"field '{name}' must be seconds since 1970, got {shown(value)}, which is no date before the year 10000. "
            "Divide it, or leave it out: --field created_at=none"
        )
    return seconds


def as_list(value: Any, name: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise DataError(f"field '{name}' must be a list, got {shown(value)}.")
    return value


def as_ids(value: Any, name: str) -> list[int]:
    """Return token ids: whole numbers from 0 to 2**31 - 1."""
    if not isinstance(value, list) or any(type(item) is not int or not 0 <= item < 2**31 for item in value):
        raise DataError(f"field '{name}' must be a list of token ids, got {shown(value)}.")
    return value


def as_mask(value: Any, name: str) -> list[bool]:
    """Return one flag per token."""
    for place, item in enumerate(as_list(value, name)):
        if item not in (0, 1):
            raise DataError(f"field '{name}' must hold 0 and 1, or false and true, got {shown(item)} at place {place}.")
    return [bool(item) for item in value]


def as_scores(value: Any, name: str) -> list[float | None]:
    """Return one log-prob per token, finite and not above 0; None where there is none (null or NaN)."""
    scores: list[float | None] = []
    for place, item in enumerate(as_list(value, name)):
        score = item if type(item) is float else as_number(item, f"{name}[{place}]")
        if not (-LARGEST <= score <= ROUNDING or score != score):
            raise DataError(
                f"field '{name}' must hold log-probs, which are finite and not above 0, got {shown(item)} at place "
                f"{place}. Write null where a token has none."
            )
        scores.append(None if score != score else score)
    return scores


def as_answer(value: Any, name: str) -> str | None:
    """Return a reference answer as text: what is not text becomes JSON."""
    if value is None or isinstance(value, str):
        return None if value is None else check_text(value, name)
    return json.dumps(value, ensure_ascii=True, default=str)


def as_reason(value: Any, name: str) -> str:
    """Return why a completion ended, as text: a word, or a number as vLLM gives for a stop token."""
    if isinstance(value, float) and value != value:
        return ""
    if not isinstance(value, (str, int)):
        raise DataError(f"field '{name}' must be text, got {shown(value)}.")
    return check_text(str(value), name)


VALUES: Mapping[str, Callable[[Any, str], Any]] = {
    "prompt": as_prompt,
    "completion": as_text,
    "prompt_ids": as_ids,
    "completion_ids": as_ids,
    "completion_mask": as_mask,
    "log_probs": as_scores,
    "ref_log_probs": as_scores,
    "reward": as_reward,
    "advantage": as_advantage,
    "policy_version": as_int,
    "finish_reason": as_reason,
    "answer": as_answer,
    "created_at": as_time,
}
"""How the value of a field becomes what a rollout has under that name."""


_BESIDE_TOKENS = ("log_probs", "ref_log_probs", "advantage")


def values_of(given: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what is given of a rollout, checked; what stands beside other tokens than the policy's means nothing.

    `given` is by target, with values per token of the completion; `names` are those of the fields, for errors.
    """
    raw = {target: value for target, value in given.items() if value is not None}
    names = names or {}
    for target in ("prompt", "completion"):
        messages = raw.get(target)
        if is_messages(messages) and f"{target}_ids" not in raw:
            check_is_text(messages, names.get(target, target), sampled=target == "completion")
    if "completion_mask" in raw:
        mask = raw["completion_mask"] = as_mask(raw["completion_mask"], names.get("completion_mask", "completion_mask"))
        for target in _BESIDE_TOKENS:
            if isinstance(values := raw.get(target), list) and len(values) == len(mask):
                raw[target] = [value if on else None for value, on in zip(values, mask, strict=True)]
    return {name: made(raw[name], names.get(name, name)) for name, made in VALUES.items() if name in raw}


# -- rows of a store ---------------------------------------------------------------------------------------------------


class Encoder:
    """Makes rows of a store of rollouts, and token ids of their text.

    `tokenizer` is one of transformers, or its folder or hub name; without it every rollout must bring its token ids.
    `chat` puts text prompts through its template, and `eos` ends a completion that was not cut off with the EOS token.
    """

    def __init__(self, tokenizer: Any | None, *, chat: bool = True, eos: bool = True) -> None:
        named = isinstance(tokenizer, (str, Path))
        self.name = str(tokenizer if named else getattr(tokenizer, "name_or_path", "")) or "given"
        self.tokenizer = _load(self.name) if named else tokenizer
        self.chat, self.eos = chat, eos
        self._last: tuple[Any, tuple[list[int], bool]] | None = None

    def row(self, rollout: Rollout, source: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a rollout, apart from its ids; `meta` says what was encoded, and `source`.

        Raises:
            DataError: the text has no tokens or an unknown character; or values per token are not one per token.
            DefinitionError: there is no tokenizer.
        """
        encoded: dict[str, Any] = {}
        prompt_ids, completion_ids = rollout.prompt_ids, rollout.completion_ids
        prompt, completion, finish_reason = text_of(rollout.prompt), rollout.completion, rollout.finish_reason
        if completion_ids is None:
            for name in ("completion_mask", "log_probs", "ref_log_probs"):
                if getattr(rollout, name) is not None:
                    raise DataError(
                        f"there are values per token ({name}) and no token ids of the completion. Its text may be "
                        f"encoded as other tokens. Export the ids too, or leave the values out: --field {name}=none"
                    )
        if prompt_ids is None:
            prompt_ids, templated = self._prompt(rollout)
            encoded["prompt"] = "chat template" if templated else "text"
        if completion_ids is None:
            completion_ids, finish_reason, ended = self._completion(completion, finish_reason)
            encoded["completion"] = "text + eos" if ended else "text"
        if self.tokenizer is not None and not encoded:
            prompt, completion = prompt or self._decode(prompt_ids), completion or self._decode(completion_ids)
        if not len(prompt_ids) and not len(completion_ids):
            raise DataError("neither the prompt nor the completion has a token.")
        start = len(prompt_ids)
        ids = np.concatenate([np.asarray(prompt_ids, np.int64), np.asarray(completion_ids, np.int64)])
        mask = np.zeros(len(ids), bool)
        mask[start:] = _per_token(rollout.completion_mask, [True] * len(completion_ids), "completion_mask")
        row = {
            "input_ids": ids,
            "assistant_mask": mask,
            "log_probs": _scores(rollout.log_probs, mask, start, "log_probs"),
            "task_reward": rollout.reward,
            "policy_version": rollout.policy_version,
            "num_prompt_tokens": start,
            "created_at": rollout.created_at,
            "finish_reason": finish_reason,
            "prompt": prompt,
            "completion": completion,
            "meta": _meta(rollout, source, {"tokenizer": self.name, **encoded} if encoded else None),
        }
        if rollout.ref_log_probs is not None:
            row["ref_log_probs"] = _scores(rollout.ref_log_probs, mask, start, "ref_log_probs")
        if rollout.advantage == rollout.advantage:
            row["advantage"] = rollout.advantage
        return row

    def _need(self) -> Any:
        if self.tokenizer is None:
            raise DefinitionError(
                "the rows hold text and no token ids. Name the tokenizer of the model that will learn from them: "
                "--tokenizer FOLDER (a checkpoint; `rlhf-pipeline new-model FOLDER --text FILE` makes a small one)"
            )
        return self.tokenizer

    def _prompt(self, rollout: Rollout) -> tuple[list[int], bool]:
        key = (rollout.prompt, rollout.as_chat)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        tokenizer = self._need()
        from rlhf_pipeline.policies.chat import encode_prompt

        as_chat, is_text = self.chat and rollout.as_chat, isinstance(rollout.prompt, str)
        templated = getattr(tokenizer, "chat_template", None) is not None and (as_chat or not is_text)
        # Messages without a template are joined: better than refusing a file that another tool could train on.
        prompt = rollout.prompt if is_text or templated else text_of(rollout.prompt)
        found = encode_prompt(tokenizer, prompt, as_chat=as_chat), templated
        self._last = (key, found)
        return found

    def _completion(self, text: str, finish_reason: str) -> tuple[list[int], str, bool]:
        """Return the ids of a completion's text, how it ended, and whether the EOS token was added."""
        tokenizer = self._need()
        from rlhf_pipeline.policies.chat import encode_text

        ids = encode_text(tokenizer, text, add_special_tokens=False)
        end = getattr(tokenizer, "eos_token_id", None) if self.eos else None
        if ids and ids[-1] == end:  # the text has its special tokens
            return ids, finish_reason or "stop", False
        if end is None or finish_reason in ("length", "max_tokens"):
            return ids, finish_reason, False
        return [*ids, int(end)], finish_reason or "stop", True

    def _decode(self, ids: Sequence[int]) -> str:
        from rlhf_pipeline.policies.chat import decode_completion

        return decode_completion(self.tokenizer, ids)


def _load(name: str) -> Any:
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.count("/") != 1 or folder.parent.is_dir()):
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        near = did_you_mean(folder.name, beside) if beside else ""
        raise MissingPathError(
            f"there is no tokenizer folder at {folder}.{near} Name the checkpoint folder of your model."
        )
    from rlhf_pipeline.policies import loading

    found = loading.load_tokenizer(str(folder) if folder.is_dir() else name, local=folder.is_dir())
    if found is None:
        raise DataError(f"{folder} has no tokenizer: no tokenizer.json or tokenizer_config.json.")
    return found


def _per_token(given: Sequence[Any] | None, default: Sequence[Any], name: str) -> Sequence[Any]:
    if given is not None and len(given) != len(default):
        raise DataError(f"{len(given)} values of {name} for {len(default)} completion tokens.")
    return default if given is None else given


def _scores(given: Sequence[Any] | None, mask: Any, start: int, name: str) -> npt.NDArray[np.float32]:
    line = np.full(len(mask), np.nan, np.float32)
    line[start:] = [math.nan if s is None else s for s in _per_token(given, [None] * (len(mask) - start), name)]
    line[~mask] = np.nan
    return line


def _meta(rollout: Rollout, source: Mapping[str, Any], encoded: Mapping[str, Any] | None) -> str:
    """Return the JSON of the column `meta`: the answer, the other fields of the row, chat messages, the source."""
    meta: dict[str, Any] = {"answer": rollout.answer, "prompt": rollout.meta, "source": source}
    if encoded is not None:
        meta["encoded"] = encoded
    if not isinstance(rollout.prompt, str):
        meta["messages"] = rollout.prompt
    try:
        text = json.dumps(meta, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:  # NaN, which JSON does not have, becomes null
        finite = json.loads(json.dumps(meta, default=str), parse_constant=lambda name: None)
        text = json.dumps(finite, ensure_ascii=False)
    try:
        return check_text(text, "meta")
    except DataError:
        for name, value in rollout.meta.items():  # name the one
            check_text(json.dumps({name: value}, ensure_ascii=False, default=str), name)
        raise
