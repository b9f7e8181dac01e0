"""verl 0.9, the v1 trainer: every trajectory that the trainer samples, and those of groups that it clears.

    trainer.v1.sampler.custom_sampler.path=pkg://trajectory_store.adapters.verl
    trainer.v1.sampler.custom_sampler.name=RecordingBuffer        # of the sync trainer; else RecordingBufferAsync

with `TRAJECTORY_STORE=FOLDER` in the environment. `ServingBuffer` in its place serves the groups of that store.

Source: `ReplayBuffer.sample` and `_clear_groups` of `verl/trainer/ppo/v1/replay_buffer.py` (verl 0.9.1); the fields
and tags of `verl/trainer/ppo/v1/agent_loop_tq.py`.
"""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import copy
import json
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajectory_store import extras
from trajectory_store.adapters import recorder_here, store_here
from trajectory_store.adapters.recorded_rewards import episode_outcomes, reward_part
from trajectory_store.errors import BatchError, SchemaError
from trajectory_store.recorder import TrajectoryRecorder, learnable_rows
from trajectory_store.recorder.standard import EPISODE
from trajectory_store.store import TrajectoryStore

FIELDS = [
    *("uid", "prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "reward_model"),
    *("num_turns", "extra_fields"),
]
_TURNS_OF_ONE_REPLY = 2
"""The number of turns that verl reports for a prompt and a reply."""
_BASES = {
    "RecordingBuffer": "ReplayBuffer",
    "RecordingBufferAsync": "ReplayBufferAsync",
    "ServingBuffer": "ReplayBuffer",
}


def __getattr__(name: str) -> Any:
    """Return a class over verl's own, which is imported when verl names it."""
    if name not in _BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = extras.load("verl.trainer.ppo.v1.replay_buffer", "verl's sampler")
    queue = extras.load("transfer_queue", "verl's sampler")
    base = as_verl_builds(getattr(module, _BASES[name]))
    if name == "ServingBuffer":
        return serving(base, queue, store_here(), _tensors)
    return recording(base, queue)


def as_verl_builds(base: Any) -> Any:
    """Return a subclass of verl's replay buffer with all settings that verl gives its own.

    verl's `_build_replay_buffer` passes a custom sampler neither the filter of groups nor refills, batch sizes and
    limits, so the subclass takes them from the buffer that verl builds without a custom sampler.
    """

    class Built(base):
        def __init__(self, **arguments: Any) -> None:
            plain = _plain_buffer(arguments)
            if not isinstance(self, type(plain)):
                raise SchemaError(
                    f"verl uses {type(plain).__name__} if trainer.v1.trainer_mode is {arguments['trainer_mode']!r}. "
                    f"Select a class derived from {type(plain).__name__}: "
                    + ", ".join(name for name, of in _BASES.items() if of == type(plain).__name__)
                )
            self.__dict__.update(vars(plain))

    return Built


def _plain_buffer(arguments: dict[str, Any]) -> Any:
    """Return what verl's trainer builds from its settings without a custom sampler."""
    refill = arguments["refill_fn"]
    trainer = getattr(refill, "__self__", None)
    if trainer is None:  # a function around the trainer's method: its settings are those that ours are part of
        builder: Any = extras.load("verl.trainer.ppo.v1.trainer_base", "verl's trainer").PPOTrainer
        settings = arguments["sampler_kwargs"]._get_root()
    else:
        builder, settings = type(trainer), trainer.config
    copied = copy.deepcopy(settings)
    extras.load("omegaconf", "verl's settings").OmegaConf.update(
        copied, "trainer.v1.sampler.custom_sampler", None, force_add=True
    )
    view = _Trainer(builder if trainer is None else trainer, copied, arguments["trainer_mode"], refill)
    return builder._build_replay_buffer(view)


class _Trainer:
    """A trainer of verl's, or its class, with other settings."""

    def __init__(self, of: Any, config: Any, trainer_mode: str, refill: Any) -> None:
        self._of, self.config, self.trainer_mode, self._add_prompts_to_generate = of, config, trainer_mode, refill

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        return types.MethodType(value, self) if isinstance(value, types.FunctionType) else value


def recording(base: Any, queue: Any, recorder: TrajectoryRecorder | None = None) -> Any:
    """Return a subclass of verl's replay buffer that records its samples; `queue` is the module `transfer_queue`."""

    class Recording(base):
        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
            meta, metrics = super().sample(global_steps, partition_id, batch_size)
            record(recorder or recorder_here(), queue, partition_id, dict(zip(meta.keys, meta.tags, strict=True)))
            return meta, metrics

        def _clear_groups(self, partition_id: str, uids: Any) -> None:
            snapshot = self.partitions[partition_id]
            cleared = {key: tag for key, tag in snapshot.items() if key.split("_")[0] in uids}
            record(recorder or recorder_here(), queue, partition_id, cleared, cleared=True)
            super()._clear_groups(partition_id, uids)

    return Recording


def record(
    recorder: TrajectoryRecorder, queue: Any, partition: str, tags: dict[str, Any], *, cleared: bool = False
) -> None:
    """Record the trajectories of keys `PROMPT_SESSION_OUTPUT` from verl's queue, in the groups of their prompts.

    The outputs of a session are an episode, to each of which verl gives the reward of the last one.
    """
    keys = [key for key, tag in tags.items() if tag.get("status", "success") == "success" and "is_padding" not in tag]
    if not keys:
        return
    keys = sorted(keys, key=_place(keys))
    data = queue.kv_batch_get(keys=keys, partition_id=partition, select_fields=FIELDS)
    fields = {name: _rows(data[name]) for name in FIELDS if name in data}
    scores, truths = fields.get("rm_scores"), fields.get("reward_model")
    extras_of_rows = [dict(extra or {}) for extra in fields.get("extra_fields", [None] * len(keys))]
    details = [dict(extra.get("reward_extra_info") or {}) for extra in extras_of_rows]
    turns = fields.get("num_turns", [None] * len(keys))
    episodes = [key.rsplit("_", 1)[0] for key in keys]
    rewards = None if scores is None else [math.fsum(row) for row in scores]
    recorder.record(
        prompt_ids=fields["prompts"],
        completion_ids=fields["responses"],
        completions=[""] * len(keys),
        completion_masks=fields["response_mask"],
        log_probs=fields.get("rollout_log_probs"),
        rewards=None if rewards is None else episode_outcomes(rewards, episodes),
        named_rewards=_named_rewards(details),
        answers=None if truths is None else [dict(truth or {}).get("ground_truth") for truth in truths],
        policy_version=[_version(tags[key].get("min_global_steps")) for key in keys],
        evaluation=partition == "val",
        groups=[key.rsplit("_", 2)[0] for key in keys],
        episodes=episodes,
        one_prompt=False,  # verl forms the groups, and an agent may begin each session differently
        metas=[
            {
                "key": key,
                "cleared": cleared,
                "newest": tags[key].get("max_global_steps"),
                "num_turns": None if turns[i] is None else int(turns[i]),
                **({"reward_extra_info": details[i]} if details[i] else {}),
            }
            for i, key in enumerate(keys)
        ],
        source="verl",
    )


def _place(keys: list[str]) -> Callable[[str], tuple[int, int]]:
    """Return the order in which sessions come as they do in `keys`, and the outputs of each by their number."""
    sessions = {session: i for i, session in enumerate(dict.fromkeys(key.rsplit("_", 1)[0] for key in keys))}
    return lambda key: (sessions[key.rsplit("_", 1)[0]], int(key.rsplit("_", 1)[1]))


def _named_rewards(details: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Return the numbers that a reward function of verl returns beside its score, by name.

    Rows need not have the same names, and what is not a number stays in `meta`.
    """
    names = dict.fromkeys(name for row in details for name, value in row.items() if _is_number(value))
    return {reward_part(name): [_number(row.get(name)) for row in details] for name in names}


def _is_number(value: Any) -> bool:
    return _number(value) is not None


def _number(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
    return float(value) if isinstance(value, (bool, int, float)) and math.isfinite(value) else None


def _tensors(rows: list[dict[str, Any]]) -> Any:
    """Return rows as verl's own TensorDict, each array a tensor."""
    stack = extras.load("verl.utils.tensordict_utils", "verl's sampler").list_of_dict_to_tensordict
    tensor = extras.load("torch", "verl's sampler").as_tensor
    return stack([{k: tensor(v) if isinstance(v, np.ndarray) else v for k, v in row.items()} for row in rows])


def _version(step: Any) -> int:
    return -1 if step is None else int(step)


def _rows(values: Any) -> list[Any]:
    """Return the rows of a nested or a padded tensor as lists, and those of anything else unchanged."""
    rows = values.unbind() if hasattr(values, "unbind") else values
    return [row.tolist() if hasattr(row, "tolist") else getattr(row, "data", row) for row in rows]


def serving(base: Any, queue: Any, store: str, fields_of: Any) -> Any:
    """Return a subclass of verl's replay buffer that serves the groups of a store as the samples of training.

    Whole groups are served in the order of the store, over and over. What the trainer generates meanwhile is left where
    it is: give it as few prompts as it takes.

    Args:
        base: verl's `ReplayBuffer` or `ReplayBufferAsync`.
        queue: the module `transfer_queue`.
        store: folder of the store.
        fields_of: makes a TensorDict of rows, such as verl's `list_of_dict_to_tensordict`.
    """
    stored = _Stored.read(store)

    class Serving(base):
        served = 0

        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
            if partition_id != "train":
                return super().sample(global_steps, partition_id, batch_size)
            keys, rows = list[str](), list[dict[str, Any]]()
            for number in range(self.served, self.served + batch_size):
                members = stored.groups[number % len(stored.groups)]
                uid = f"stored-{number}"
                rows += [_fields(stored.columns, row, uid, stored.rewards[row]) for _, _, row in members]
                keys += [f"{uid}_{session}_{output}" for session, output, _ in members]
            self.served += batch_size
            tags = [_tag(fields, global_steps) for fields in rows]
            return queue.kv_batch_put(keys=keys, partition_id="train", fields=fields_of(rows), tags=tags), {}

    return Serving


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """The rows of a store that may be learned from, in groups: of each row its session, its output there, its place."""

    columns: dict[str, Any]
    rewards: list[float]
    groups: list[list[tuple[int, int, int]]]

    @classmethod
    def read(cls, store: str) -> _Stored:
        """Read them.

        Raises:
            BatchError: there are none.
        """
        with TrajectoryStore.open(store, mode="r") as opened:
            names = ["input_ids", "num_prompt_tokens", "assistant_mask", "log_probs", "task_reward", "group_id", "meta"]
            episode = [column.name for column in EPISODE if column.name in opened.schema]
            row_ids = learnable_rows(opened).row_ids
            columns = opened.read(row_ids, [*names, *episode])
        if not len(row_ids):
            raise BatchError(f"{store} has no rows that may be used for training.")
        rewards, groups = columns["task_reward"].tolist(), dict[int, list[tuple[int, int, int]]]()
        outputs = columns[episode[1]].tolist() if episode else [0] * len(row_ids)
        for row in reversed(range(len(rewards) - 1)):  # verl's outputs of a session all have its reward
            if outputs[row + 1]:
                rewards[row] = rewards[row + 1]
        for row, group in enumerate(columns["group_id"].tolist()):
            members = groups.setdefault(group, [])
            session = members[-1][0] + (not outputs[row]) if members else 0
            members.append((session, outputs[row], row))
        return cls(columns=columns, rewards=rewards, groups=list(groups.values()))


def _fields(stored: Any, row: int, uid: str, reward: float | None = None) -> dict[str, Any]:
    """Return what verl's agent loop puts for a row, as far as a store knows it; `reward` is that of its session."""
    start, ids = int(stored["num_prompt_tokens"][row]), stored["input_ids"][row].astype(np.int64)
    mask = stored["assistant_mask"][row][start:].astype(np.int64)
    scores = np.zeros(len(mask), np.float32)
    scores[-1:] = stored["task_reward"][row] if reward is None else reward
    meta = json.loads(stored["meta"][row] or "{}")
    about = meta.get("prompt") or {}
    return {
        "prompts": ids[:start],
        "responses": ids[start:],
        "input_ids": ids,
        "position_ids": np.arange(len(ids)),
        "attention_mask": np.ones(len(ids), np.int64),
        "response_mask": mask,
        "loss_mask": mask,
        "rollout_log_probs": np.nan_to_num(stored["log_probs"][row][start:]),
        "rm_scores": scores,
        "num_turns": int(about.get("num_turns") or _TURNS_OF_ONE_REPLY),
        "reward_model": {"ground_truth": meta.get("answer")},
        "extra_fields": {"reward_extra_info": about.get("reward_extra_info") or {}},
        "metrics": {},
        "multi_modal_inputs": {},
        "uid": uid,
    }


def _tag(fields: dict[str, Any], step: int) -> dict[str, Any]:
    sizes = {"prompt_len": len(fields["prompts"]), "response_len": len(fields["responses"])}
    steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"), step)
    return {"status": "success", **sizes, "seq_len": len(fields["input_ids"]), **steps}
