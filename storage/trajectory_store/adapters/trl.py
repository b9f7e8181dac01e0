"""Hooks into TRL's trainers."""

# pyright: standard
# Foreign data, whose types are checked at run time.
from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trajectory_store import extras
from trajectory_store.adapters.recorded_rewards import reward_part
from trajectory_store.errors import BatchError, SchemaError
from trajectory_store.recorder.learnable_rows import learnable_rows
from trajectory_store.recorder.raw_rollout import text_of, weighted
from trajectory_store.recorder.standard import EPISODE
from trajectory_store.store import TrajectoryStore

if TYPE_CHECKING:
    from trajectory_store.recorder import TrajectoryRecorder

_log = logging.getLogger("trajectory_store")
_REWARDS = "rewards/"
"""The prefix of the names of individual rewards in TRL's metrics."""
_SAMPLES, _GRADES, _SCORES = (
    "_generate_and_score_completions",
    "_calculate_rewards",
    "_get_per_token_logps_and_entropies",
)


def listen(recorder: TrajectoryRecorder, trainer: Any, *, compute_log_probs: bool, record_eval: bool) -> None:
    """Record what a trainer samples: see `TrajectoryRecorder.attach`.

    Source: `GRPOTrainer._generate_and_score_completions` of TRL 1.16. It samples a batch, calls `_calculate_rewards`
    with prompts, completions and token ids, which gives the rewards of all processes, and returns padded tensors.
    """
    missing = [name for name in (_SAMPLES, _GRADES, _SCORES, "state", "accelerator") if not hasattr(trainer, name)]
    if missing:
        raise SchemaError(
            f"{type(trainer).__name__} lacks attributes of the GRPOTrainer in TRL 1.16: {', '.join(missing)}. "
            "Record through the reward functions: reward_funcs=recorder.reward_funcs([...])."
        )
    _check_server(trainer)
    if compute_log_probs and (cut := _truncated(trainer)) and not getattr(trainer, "use_vllm", False):
        _log.warning("log-probs of completions sampled with %s cannot be computed after sampling, so they are NaN", cut)
    recorder.rank = trainer.accelerator.process_index
    recorder.world_size = trainer.accelerator.num_processes
    sample, grade = getattr(trainer, _SAMPLES), getattr(trainer, _GRADES)
    heard: dict[str, Any] = {}

    def graded(inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        rewards = grade(inputs, prompts, completions, completion_ids)
        heard.update(inputs=inputs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        heard["rewards"] = rewards
        return rewards

    def sampled(inputs: Any) -> Any:
        heard.clear()
        output = sample(inputs)
        training = bool(trainer.model.training)
        if heard and (training or record_eval):
            size = trainer.num_generations if training else trainer.num_generations_eval
            _record(recorder, trainer, heard, output, compute_log_probs, size)
        return output

    setattr(trainer, _GRADES, graded)
    setattr(trainer, _SAMPLES, sampled)
    trainer.add_callback(flush_callback(recorder))


def _truncated(trainer: Any) -> str:
    """Return the settings by which a trainer samples from another distribution than the model's at its temperature."""
    plain = {"top_p": (1, None), "top_k": (0, -1, None), "min_p": (0, None), "repetition_penalty": (1, None)}
    settings = {name: getattr(trainer, name, None) for name in plain}
    settings |= getattr(getattr(trainer, "args", None), "generation_kwargs", None) or {}
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value not in plain.get(name, ()))


def _check_server(trainer: Any) -> None:
    """Reject a vLLM server whose log-probs are not of the distribution that it samples from; TRL only warns."""
    if not getattr(trainer, "use_vllm", False) or trainer.vllm_mode != "server":
        return
    if not trainer.accelerator.is_main_process or (trainer.temperature == 1 and not _truncated(trainer)):
        return
    mode = trainer.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise SchemaError(
            f"the vLLM server reports {mode}, which are log-probs at temperature 1, not at the trainer's temperature "
            f"of {trainer.temperature}. Start the server with --logprobs-mode processed_logprobs."
        )


def _record(
    recorder: TrajectoryRecorder, trainer: Any, heard: dict[str, Any], output: Any, compute: bool, group_size: int
) -> None:
    ids: Sequence[Sequence[int]] = heard["completion_ids"]
    num = len(ids)
    mine = slice(recorder.rank * num, (recorder.rank + 1) * num)
    rewards = weighted(_array(heard["rewards"])[mine], _array(trainer.reward_weights))
    padded, real = output["prompt_ids"].cpu().numpy(), output["prompt_mask"].cpu().numpy().astype(bool)
    prompts = [row[mask] for row, mask in zip(padded, real, strict=True)]
    scores = output.get("sampling_per_token_logps")
    if scores is None and not _truncated(trainer):
        scores = output.get("old_per_token_logps")
        if scores is None and compute:
            scores = _computed(trainer, prompts, ids)
    ends: set[Any] = set(getattr(trainer, "eos_token_ids", None) or ())
    if ends:  # a sampled padding token ends a completion, too, as in the trainer's own count of truncated ones
        ends.add(getattr(getattr(trainer, "_tokenizer", None), "pad_token_id", None))
    masks = _loss_masks(output, ids)
    modes = [("processed" if scores is not None and any(mask) else "") for mask in masks]
    columns = [{k: v for k, v in row.items() if k not in ("prompt", "image", "images")} for row in heard["inputs"]]
    recorder.record(
        prompts=heard["prompts"],
        prompt_ids=[row.tolist() for row in prompts],
        completions=heard["completions"],
        completion_ids=ids,
        completion_masks=masks,
        log_probs=_rows(scores, ids),
        ref_log_probs=_rows(output.get("ref_per_token_logps"), ids),
        rewards=rewards.tolist(),
        advantages=_array(output["advantages"]).tolist(),
        answers=[row.get("answer", row.get("ground_truth", row.get("solution"))) for row in columns],
        finish_reasons=["stop" if row and row[-1] in ends else "length" for row in ids] if ends else None,
        metas=columns,
        policy_version=int(trainer.state.global_step),
        temperature=getattr(trainer, "temperature", None),
        log_prob_mode=modes,
        evaluation=not trainer.model.training,
        engine="vllm" if getattr(trainer, "use_vllm", False) else "transformers",
        group_size=group_size,
        source=f"trl {type(trainer).__name__}",
    )


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
    """Switch dropout off, and each part back to its mode afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _computed(trainer: Any, prompts: Sequence[np.ndarray], ids: Sequence[Sequence[int]]) -> Any:
    """Return log-probs `[n, longest completion]` of the weights that sampled, at the trainer's temperature."""
    left, right = max(len(row) for row in prompts), max(max(len(row) for row in ids), 1)
    torch, device = extras.load("torch", "TRL"), trainer.accelerator.device
    tokens = torch.zeros((len(ids), left + right), dtype=torch.int64)
    mask = torch.zeros((len(ids), left + right), dtype=torch.int64)
    for i, (prompt, completion) in enumerate(zip(prompts, ids, strict=True)):
        row = torch.tensor([*prompt.tolist(), *completion])
        tokens[i, left - len(prompt) : left + len(completion)] = row
        mask[i, left - len(prompt) : left + len(completion)] = 1
    size = trainer.args.per_device_train_batch_size
    # Without dropout: it would draw from the generator that the trainer samples with, and change its numbers.
    with _evaluated(trainer.model), torch.no_grad():
        scores = getattr(trainer, _SCORES)(trainer.model, tokens.to(device), mask.to(device), right, batch_size=size)
    return scores[0]


def _loss_masks(output: dict[str, Any], ids: Sequence[Sequence[int]]) -> list[list[bool]]:
    """Return which completion tokens the trainer learns from.

    Not from words of an environment, nor from completions that `mask_truncated_completions` masks: these count for the
    baseline of their group alone, and TRL's log-probs of them are of another input, as it hides them from attention.
    """
    masks = [_array(output[name]) != 0 for name in ("completion_mask", "tool_mask") if output.get(name) is not None]
    return [[all(mask[i][k] for mask in masks) for k in range(len(row))] for i, row in enumerate(ids)]


def _rows(scores: Any, ids: Sequence[Sequence[int]]) -> list[list[float]] | None:
    """Return the real part of padded scores; None where they are not there, or not one per token."""
    if scores is None or scores.ndim != 2:
        return None
    return [row[: len(ids[i])].tolist() for i, row in enumerate(_array(scores))]


def _array(values: Any) -> np.ndarray:
    return values.detach().float().cpu().numpy().astype(np.float64)


def flush_callback(recorder: TrajectoryRecorder) -> Any:
    """Return a `TrainerCallback` that flushes a recorder when the trainer saves and ends, and announces a resume."""
    callback: Any = extras.load("transformers", "TRL").TrainerCallback

    class Flush(callback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                recorder.resume(int(state.global_step))

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.flush()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.flush()

    return Flush()


class RecordingQueue:
    """The queue of TRL's `AsyncGRPOTrainer` (1.16): what its trainer takes is recorded first.

        trainer = AsyncGRPOTrainer(...)
        trainer.rollout_queue = RecordingQueue(trainer.rollout_queue, recorder, temperature=trainer.temperature)

    Source: `RolloutSample` of `trl/experimental/async_grpo/async_rollout_worker.py`, which `RolloutQueueDataset` gets;
    `_score_group` there puts the rewards of a conversation into the metrics of its samples. A worker counts groups from
    0, so they are named within this recorder. A conversation whose history was rewritten is several samples, which name
    no conversation: each is an episode.
    """

    def __init__(self, inner: Any, recorder: TrajectoryRecorder, *, temperature: float | None = None) -> None:
        self.inner, self.recorder, self.temperature = inner, recorder, temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next sample, once it is recorded."""
        sample = self.inner.get(*args, **kwargs)
        ids, mask = np.asarray(sample.input_ids), np.asarray(sample.completion_mask) > 0
        start = int(np.argmax(mask)) if mask.any() else len(ids)
        metrics = dict(sample.metrics)
        parts = {name: value for name, value in metrics.items() if name.startswith(_REWARDS)}
        self.recorder.record(
            prompts=[sample.prompt],
            completions=[sample.completion],
            prompt_ids=[ids[:start].tolist()],
            completion_ids=[ids[start:].tolist()],
            completion_masks=[mask[start:].tolist()],
            log_probs=[np.asarray(sample.old_log_probs, np.float64)[start:].tolist()],
            rewards=[metrics.get("reward")],
            named_rewards={reward_part(name.removeprefix(_REWARDS)): [value] for name, value in parts.items()},
            advantages=[float(sample.advantage)],
            policy_version=int(sample.model_version),
            temperature=self.temperature,
            log_prob_mode="processed",
            groups=[f"{sample.model_version}/{sample.group_id}"],
            run_id=self.recorder.session_id,
            one_prompt=False,  # TRL forms the groups, and an environment may begin each conversation differently
            metas=[metrics],
            engine="vllm",
            source="trl AsyncGRPOTrainer",
        )
        return sample


def stored_rollouts(store: str | Path) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a `rollout_func` for TRL's GRPOTrainer (1.16) that serves the rows of a store in place of sampling.

        GRPOTrainer(..., rollout_func=stored_rollouts("runs/old/store"), reward_funcs=stored_reward)

    The members of a stored group of the same prompt are served in turn, group after group, over and over; which rows
    may be learned from, `trajectory_store.recorder.learnable_rows` decides.

    Raises (the function that is returned):
        BatchError: the store holds no rows of a prompt that may be learned from.
    """
    with TrajectoryStore.open(store, mode="r") as opened:
        names = ["input_ids", "num_prompt_tokens", "assistant_mask", "log_probs", "task_reward", "prompt", "group_id"]
        row_ids = learnable_rows(opened).row_ids
        if (size := EPISODE[2].name) in opened.schema:
            single = opened.read_scalars(size, row_ids) == 1
            if not single.all():
                _log.warning(
                    "%s: %d rows of episodes with several rows are skipped, because TRL counts each row as a member "
                    "of its group",
                    store,
                    np.count_nonzero(~single),
                )
            row_ids = row_ids[single]
        rows = opened.read(row_ids, names)
    turns: dict[str, list[int]] = defaultdict(list)
    for place in np.argsort(rows["group_id"], kind="stable").tolist():
        turns[rows["prompt"][place]].append(place)
    served: dict[str, int] = defaultdict(int)

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        served_rows: dict[str, list[Any]] = defaultdict(list)
        for prompt in prompts:
            key = text_of(prompt)
            if key not in turns:
                raise BatchError(f"for the prompt {key[:60]!r}, {store} has no rows that may be used for training.")
            place = turns[key][served[key] % len(turns[key])]
            served[key] += 1
            start = int(rows["num_prompt_tokens"][place])
            served_rows["prompt_ids"].append(rows["input_ids"][place][:start].tolist())
            served_rows["completion_ids"].append(rows["input_ids"][place][start:].tolist())
            served_rows["logprobs"].append(np.nan_to_num(rows["log_probs"][place][start:]).tolist())
            served_rows["env_mask"].append(rows["assistant_mask"][place][start:].astype(int).tolist())
            served_rows["stored_reward"].append(float(rows["task_reward"][place]))
        return dict(served_rows)

    return rollout_func


def stored_reward(completions: Sequence[Any], stored_reward: Sequence[float], **columns: Any) -> list[float]:
    """Return the rewards that `stored_rollouts` serves; a reward function of TRL."""
    return list(stored_reward)
