"""From rollouts to the columns of a store; text is encoded here, once."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.errors import DataError, DefinitionError, MissingPathError, did_you_mean
from rlhf_pipeline.exchange._completion import Rollout, check_text, text_of
from trajectory_store import RaggedArray

Ids = npt.NDArray[np.int64]


class Encoder:
    """Token ids of rollouts that are text.

    Args:
        tokenizer: of transformers, or the folder or hub name of one; None: every rollout must bring its token ids.
        chat: put text prompts through the chat template, where the tokenizer has one and the format allows.
        eos: end an encoded completion with the EOS token, unless it was cut off by a length limit.

    Attributes:
        name: what the tokenizer is called in `meta`.

    Raises:
        MissingPathError: there is no such folder.
        DataError: the folder has no tokenizer.
    """

    def __init__(self, tokenizer: Any | None, *, chat: bool = True, eos: bool = True) -> None:
        named = isinstance(tokenizer, (str, Path))
        self.name = str(tokenizer if named else getattr(tokenizer, "name_or_path", "")) or "given"
        self.tokenizer = load_tokenizer(self.name) if named else tokenizer
        self.chat = chat
        self.eos = eos
        self._last: tuple[Any, tuple[list[int], bool]] | None = None

    def encode(self, rollout: Rollout) -> dict[str, Any] | None:
        """Fill in the token ids that a rollout lacks, and its text where only ids are known.

        Returns:
            What was done, for `meta`; None where all ids were given.

        Raises:
            DataError: the text has no tokens, or a character that the tokenizer does not know.
            DefinitionError: there is no tokenizer.
        """
        done: dict[str, Any] = {}
        if rollout.prompt_ids is None:
            rollout.prompt_ids, with_template = self._prompt(rollout)
            done["prompt"] = "chat template" if with_template else "text"
        if rollout.completion_ids is None:
            rollout.completion_ids, with_eos = self._completion(rollout)
            done["completion"] = "text + eos" if with_eos else "text"
        check_lengths(rollout)
        if self.tokenizer is not None and not done:
            rollout.prompt = rollout.prompt or self._decode(rollout.prompt_ids)
            rollout.completion = rollout.completion or self._decode(rollout.completion_ids)
        return {"tokenizer": self.name, **done} if done else None

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

        as_chat = self.chat and rollout.as_chat
        is_text = isinstance(rollout.prompt, str)
        templated = getattr(tokenizer, "chat_template", None) is not None and (as_chat or not is_text)
        # Messages without a template are joined: better than refusing a file that another tool could train on.
        prompt = rollout.prompt if is_text or templated else text_of(rollout.prompt)
        found = encode_prompt(tokenizer, prompt, as_chat=as_chat), templated
        self._last = (key, found)
        return found

    def _completion(self, rollout: Rollout) -> tuple[list[int], bool]:
        tokenizer = self._need()
        from rlhf_pipeline.policies.chat import encode_text

        ids = encode_text(tokenizer, rollout.completion, add_special_tokens=False)
        end = getattr(tokenizer, "eos_token_id", None) if self.eos else None
        if ids and ids[-1] == end:  # the text has its special tokens
            rollout.finish_reason = rollout.finish_reason or "stop"
            return ids, False
        if end is None or rollout.finish_reason in ("length", "max_tokens"):
            return ids, False
        rollout.finish_reason = rollout.finish_reason or "stop"
        return [*ids, int(end)], True

    def _decode(self, ids: Sequence[int]) -> str:
        return self._need().decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a checkpoint folder, or one by its hub name.

    Raises:
        MissingPathError: there is no such folder.
        DataError: the folder has no tokenizer.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.count("/") != 1 or folder.parent.is_dir()):
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, beside) if beside else ""
        hint = hint if hint.startswith(" Did") else ""
        raise MissingPathError(
            f"there is no tokenizer folder at {folder}.{hint} Name the checkpoint folder of your model."
        )
    from rlhf_pipeline.policies import loading

    found = loading.load_tokenizer(str(folder) if folder.is_dir() else name, local=folder.is_dir())
    if found is None:
        raise DataError(f"{folder} has no tokenizer: no tokenizer.json or tokenizer_config.json.")
    return found


def columns_of(rollouts: Sequence[Rollout], groups: Ids, ids: Ids, metas: Sequence[str]) -> dict[str, Any]:
    """Return the columns of encoded rollouts as `TrajectoryStore.append` takes them.

    Args:
        rollouts: with token ids.
        groups: `[n]` int64 group ids.
        ids: `[n]` int64 trajectory ids.
        metas: JSON, see `meta_of`.
    """
    tokens: list[Ids] = []
    masks: list[npt.NDArray[np.bool_]] = []
    scores: dict[str, list[npt.NDArray[np.float32]]] = {"log_probs": [], "ref_log_probs": []}
    for rollout in rollouts:
        start, ids_there = len(rollout.prompt_ids or ()), rollout.completion_ids or ()
        row = np.concatenate([np.asarray(rollout.prompt_ids, np.int64), np.asarray(ids_there, np.int64)])
        mask = np.zeros(len(row), bool)
        mask[start:] = True if rollout.completion_mask is None else rollout.completion_mask
        tokens.append(row)
        masks.append(mask)
        for name, given in (("log_probs", rollout.log_probs), ("ref_log_probs", rollout.ref_log_probs)):
            line = np.full(len(row), np.nan, np.float32)
            if given is not None:
                line[start:] = [math.nan if score is None else score for score in given]
                line[~mask] = np.nan
            scores[name].append(line)
    lengths = np.array([len(row) for row in tokens], np.int64)
    columns: dict[str, Any] = {
        "input_ids": _flat(tokens, lengths, np.int64),
        "assistant_mask": _flat(masks, lengths, np.bool_),
        "log_probs": _flat(scores["log_probs"], lengths, np.float32),
        "task_reward": np.array([rollout.reward for rollout in rollouts], np.float32),
        "group_id": groups,
        "trajectory_id": ids,
        "policy_version": np.array([rollout.policy_version for rollout in rollouts], np.int64),
        "num_prompt_tokens": np.array([len(rollout.prompt_ids or ()) for rollout in rollouts], np.int64),
        "created_at": np.array([rollout.created_at for rollout in rollouts], np.float64),
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "prompt": [text_of(rollout.prompt) for rollout in rollouts],
        "completion": [rollout.completion for rollout in rollouts],
        "meta": list(metas),
    }
    if any(rollout.ref_log_probs is not None for rollout in rollouts):
        columns["ref_log_probs"] = _flat(scores["ref_log_probs"], lengths, np.float32)
    advantages = np.array([rollout.advantage for rollout in rollouts], np.float32)
    if not np.isnan(advantages).all():
        columns["advantage"] = advantages
    return columns


def _flat(rows: Sequence[npt.NDArray[Any]], lengths: Ids, dtype: Any) -> RaggedArray:
    return RaggedArray(np.concatenate(rows).astype(dtype, copy=False), lengths)


def check_lengths(rollout: Rollout) -> None:
    """Check that there are tokens, and that per-token values have one item per completion token.

    Raises:
        DataError: they have not.
    """
    length = len(rollout.completion_ids or ())
    if not length and not rollout.prompt_ids:
        raise DataError("neither the prompt nor the completion has a token.")
    for name in ("completion_mask", "log_probs", "ref_log_probs"):
        given = getattr(rollout, name)
        if given is not None and len(given) != length:
            raise DataError(f"{len(given)} values of {name} for {length} completion tokens.")


def meta_of(rollout: Rollout, more: dict[str, Any]) -> str:
    """Return the JSON of the column `meta`: the answer, the other fields of the row, chat messages, and `more`.

    Raises:
        DataError: a field holds text that is not UTF-8.
    """
    meta: dict[str, Any] = {"answer": rollout.answer, "prompt": rollout.meta, **more}
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
