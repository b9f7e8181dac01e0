"""Turns the steps of TorchRL's `LLMCollector` and `ChatEnv` into rows of the write path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs.transforms import Transform

from rlhf_pipeline.data import keys
from rlhf_pipeline.errors import DataError, IncompleteError, MissingKeyError
from rlhf_pipeline.policies.encoding import history_messages

__all__ = ["ChatTrajectories"]

_RESERVED = frozenset({"reward", "done", "terminated", "truncated", "query", "collector", "next"})
_OPTIONS = "LLMCollector(..., yield_completed_trajectories=True)"


class ChatTrajectories(Transform):
    """Turns the steps of a `ChatEnv` into one row per trajectory, on the write path.

    A step of a `ChatEnv` is one turn, and contains the conversation up to it. The row of a trajectory has the tokens of
    its last turn, with the assistant's mask and the log-probs of all turns at the positions of their tokens. Put it
    last in the list, so that it runs first:

        Compose(MCAdvantage(8), KLRewardTransform(coef=0.1), RetrieveLogProb(reference), ChatTrajectories())

    Nothing is tokenized here. If the tokens of a turn are not a prefix of the next turn's, the conversation was encoded
    again from its text and the sampled tokens are lost, so the batch is rejected.

    Reads: `tokens` (prompt, response, full), `("log_probs", "response")`, `("next", "reward")`, `("next", "done")`,
    and if present `group_id`, `query`, `policy_version`, `("next", "terminated")`, `history`. Writes the keys of
    `rlhf_pipeline.data.keys`; `task_reward` is the sum of the turns' rewards. Other numbers and strings of the last
    turn are kept, for `TrajectoryStorage(extra=...)`.

    Args:
        group_key: identity of the group, a number or a string. None takes `group_id` if present, otherwise `query`,
            which makes two equal questions one group.
        keep_log_probs: False omits the sampler's log-probs, and
            `RetrieveLogProb(reference, behaviour_model=policy)` fills them in.

    Raises:
        DataError: a trajectory is incomplete, turns do not fit together, or log-probs come from a sampler known to be
            wrong (TorchRL's `TransformersWrapper` sets the first of each turn to 0).

    >>> from rlhf_pipeline import Tokens, LogProbs
    >>> def turn(prompt, response, reward, done):
    ...     tokens = Tokens(prompt=torch.tensor(prompt), response=torch.tensor(response),
    ...                     full=torch.tensor(prompt + response))
    ...     scores = LogProbs(response=torch.full((len(response),), -1.0))
    ...     return TensorDict({"tokens": tokens, "log_probs": scores, "group_id": torch.tensor(3),
    ...                        "next": {"reward": torch.tensor([reward]), "done": torch.tensor([done])}})
    >>> steps = lazy_stack([turn([5], [6, 7], 0.0, False), turn([5, 6, 7, 8], [9], 1.0, True)])
    >>> row = ChatTrajectories().inv(steps)[0]
    >>> row["tokens", "full"].tolist(), row["masks", "all_assistant_mask"].tolist()
    ([5, 6, 7, 8, 9], [False, True, True, False, True])
    >>> row["log_probs", "full"].tolist(), row["task_reward"].item()
    ([nan, -1.0, -1.0, nan, -1.0], 1.0)
    """

    takes_steps = True
    """The buffer passes turns to this transform unchanged, not as rows."""

    def __init__(self, group_key: keys.Key | None = None, *, keep_log_probs: bool = True) -> None:
        super().__init__()
        self.group_key = group_key
        self.keep_log_probs = keep_log_probs

    def inv(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the trajectories `[n]` of a batch of turns; the input is not changed."""
        return self._inv_call(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if tensordict is None or 0 in tensordict.batch_size:
            return None
        rows = [self._row(turns) for turns in _trajectories(tensordict)]
        self._check_sampler(rows)
        out: Any = [row for row, _ in rows]
        if not any(len(row.get(keys.VERSION_SPANS, ())) for row in out):
            out = [row.exclude(keys.VERSION_SPANS) for row in out]
        return lazy_stack(out)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a batch sampled from the buffer unchanged."""
        return tensordict

    def _row(self, turns: Sequence[Any]) -> tuple[TensorDict, list[float]]:
        """Return the row of one trajectory, and the log-prob of the first token of each turn."""
        full = _tokens(turns[-1], "full", len(turns))
        full = full[_real(turns[-1], len(full), len(turns))]
        assistant_mask = torch.zeros(len(full), dtype=torch.bool)
        scores = torch.full((len(full),), float("nan"))
        first, begins, num_prompt_tokens = [], [], 0
        for number, turn in enumerate(turns, 1):
            prompt, response = _tokens(turn, "prompt", number), _tokens(turn, "response", number)
            real = _real(turn, len(prompt) + len(response), number)
            real, sampled = real[: len(prompt)], real[len(prompt) :]
            prompt, response = prompt[real], response[sampled]
            num_prompt_tokens = num_prompt_tokens or len(prompt)
            begins.append(len(prompt))
            end = len(prompt) + len(response)
            if not torch.equal(torch.cat((prompt, response)), full[:end]):
                raise DataError(
                    f"The {end} tokens of turn {number} are not the beginning of the {len(full)} tokens of turn "
                    f"{len(turns)}: the conversation was encoded again from its text. Create the policy with "
                    "prefer_tokens=True and use an IncrementalTokenizer in the environment, or end trajectories "
                    "after one turn."
                )
            assistant_mask[len(prompt) : end] = True
            if self.keep_log_probs and len(response):
                value = turn.get(("log_probs", "response"), None)
                if value is None or value.numel() != len(sampled):
                    count = "no" if value is None else value.numel()
                    raise DataError(
                        f"Turn {number} has {count} log-probs for {len(sampled)} sampled tokens. Sample with "
                        "return_log_probs=True, or pass keep_log_probs=False and score the tokens with "
                        "RetrieveLogProb's behaviour_model."
                    )
                value = value.reshape(-1)[sampled].float()
                scores[len(prompt) : end] = value
                first.append(float(value[0]))
        row = TensorDict({keys.TOKENS: full, keys.ASSISTANT_MASK: assistant_mask})
        row[keys.ATTENTION_MASK] = torch.ones_like(assistant_mask)
        if self.keep_log_probs:
            row[keys.LOG_PROBS] = scores
        row[keys.NUM_PROMPT_TOKENS] = torch.tensor(num_prompt_tokens)
        self._label(row, turns, begins)
        _keep_further(row, turns[-1])
        return row, first

    def _label(self, row: TensorDict, turns: Sequence[Any], begins: Sequence[int]) -> None:
        first, last = turns[0], turns[-1]
        rewards = [turn.get(("next", "reward"), None) for turn in turns]
        if all(reward is None for reward in rewards):
            raise DataError(
                "No turn has the key ('next', 'reward'). Append a transform to the environment to compute it."
            )
        total = sum(float(torch.as_tensor(r).double().sum()) for r in rewards if r is not None)
        row[keys.TASK_REWARD] = torch.tensor(total, dtype=torch.float32)
        row[keys.DONE] = torch.tensor(True)
        names = (keys.GROUP_ID, "query") if self.group_key is None else (self.group_key,)
        identity = next((v for name in names if (v := _plain(first, name)) is not None), None)
        if identity is None:
            raise DataError(
                f"No turn has a group identity under {' or '.join(map(repr, names))}. Set a group_id in the data "
                "loader, the same for all repeats of a prompt."
            )
        if isinstance(identity, str):
            row["query"] = NonTensorData(identity)
        else:
            row[keys.GROUP_ID] = torch.tensor(int(identity))
        versions = [int(v) for turn in turns if isinstance(v := _plain(turn, keys.POLICY_VERSION), int | float)]
        if versions:
            oldest, newest = min(versions), max(versions)
            row[keys.POLICY_VERSION] = torch.tensor(oldest)
            row[keys.NEWEST_POLICY_VERSION] = torch.tensor(newest if newest > oldest else -1)
            has_versions = newest > oldest and len(versions) == len(turns)
            changes = [i for i, v in enumerate(versions) if has_versions and (i == 0 or v != versions[i - 1])]
            spans = [[begins[i], versions[i]] for i in changes]
            row[keys.VERSION_SPANS] = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
        ended = last.get(("next", "terminated"), None)
        row[keys.FINISH_REASON] = NonTensorData("turns" if ended is not None and not bool(ended.any()) else "stop")
        prompt = _plain(first, "query")
        meta: dict[str, Any] = {"turns": len(turns)}
        history = last.get("history", None)
        if history is not None and getattr(history, "full", None) is not None:
            meta["messages"] = history_messages(history.full)
        row[keys.PROMPT] = NonTensorData(prompt if isinstance(prompt, str) else "")
        replies = [_plain(turn, ("text", "response")) for turn in turns]
        row[keys.COMPLETION] = NonTensorData("\n".join(text for text in replies if isinstance(text, str)))
        row[keys.META] = NonTensorData(json.dumps(meta, ensure_ascii=False))

    def _check_sampler(self, rows: Sequence[tuple[TensorDict, list[float]]]) -> None:
        first = [value for _, values in rows for value in values]
        if first and not any(first):
            raise DataError(
                "The first sampled token of every turn has log-prob 0: TorchRL's "
                "TransformersWrapper sets it to 0. Sample with as_policy(wrapper) from rlhf_pipeline.interop.torchrl, "
                "or pass keep_log_probs=False and score the tokens with RetrieveLogProb's behaviour_model."
            )


def _keep_further(row: TensorDict, turn: Any) -> None:
    """Keep further numbers and strings of the last turn; the store writes those that it has columns for."""
    for td, prefix in ((turn, ()), (turn.get("next", None), ("next",))):
        if td is None:
            continue
        for name in td.keys():  # noqa: SIM118  # a TensorDict iterates over its rows
            key: Any = (*prefix, name) if prefix else name
            if name in _RESERVED or row.get(key, None) is not None:
                continue
            value = td.get(name, None)
            if isinstance(value, Tensor) and value.numel() == 1:
                row[key] = value.reshape(())
            elif isinstance(plain := _plain(td, name), str):
                row[key] = NonTensorData(plain)


def _trajectories(td: TensorDictBase) -> list[list[Any]]:
    """Cut a batch of turns, `[T]` or `[B, T]`, into trajectories."""
    if td.batch_dims == 0:
        return _trajectories(lazy_stack([td]))  # pyright: ignore[reportArgumentType]
    if td.batch_dims > 1:
        rows = cast(Any, td.flatten(0, -2) if td.batch_dims > 2 else td).unbind(0)
        return [trajectory for row in rows for trajectory in _trajectories(row)]
    out, current = [], []
    for turn in td.unbind(0):
        current.append(turn)
        done = turn.get(("next", "done"), None)
        if done is None or bool(done.any()):
            out.append(current)
            current = []
    if current:
        raise IncompleteError(
            f"The last trajectory of the batch is not complete: its last turn, number {len(current)}, is not marked "
            f"as done. Collect complete trajectories with {_OPTIONS}."
        )
    return out


def _tokens(turn: Any, name: str, number: int) -> Tensor:
    value = turn.get(("tokens", name), None)
    if value is None:
        raise MissingKeyError(f"Turn {number} has no ('tokens', {name!r}). Sample with a policy that returns tokens.")
    return value.reshape(-1).long().cpu()


def _real(turn: Any, columns: int, number: int) -> Tensor:
    """Return which columns of a turn hold tokens: a policy with `pad_output=True` pads prompts and responses."""
    mask = turn.get(keys.ATTENTION_MASK, None)
    if mask is None:
        return torch.ones(columns, dtype=torch.bool)
    if mask.numel() != columns:
        raise DataError(
            f"Turn {number} has {columns} columns of tokens, but {keys.ATTENTION_MASK!r} has {mask.numel()} columns."
        )
    return mask.reshape(-1).bool().cpu()


def _plain(turn: Any, name: keys.Key) -> Any:
    value = turn.get(name, None)
    if isinstance(value, Tensor):
        return value.reshape(-1)[0].item() if value.numel() else None
    value = getattr(value, "data", value)
    return value[0] if isinstance(value, list) and len(value) == 1 else value
