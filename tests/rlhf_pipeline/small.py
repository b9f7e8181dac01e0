"""The small runs and stores that tests share: a run takes a fraction of a second."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlhf_pipeline import (
    GRPO,
    Buffer,
    CausalLMPolicy,
    Collect,
    Collector,
    CopyDigits,
    Learn,
    Pipeline,
    Prompt,
    Replay,
    Step,
    TinyPolicy,
    TrajectoryReplayBuffer,
    Turn,
    WritePath,
    scratch_policy,
    token_match,
)
from rlhf_pipeline.buffer.trajectory_schema import TEMPERATURE, trajectory_schema
from rlhf_pipeline.config_text import override_all
from rlhf_pipeline.data.rewards import RewardFunction, environment_reward
from rlhf_pipeline.learner import host_copies
from rlhf_pipeline.run.address import Address
from rlhf_pipeline.run.events import CollectorFinished, EventHandler, RunFinished, ignore_events
from rlhf_pipeline.run.processes import collect as collectors
from rlhf_pipeline.run.processes.rollouts import StoredRollout
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.start import run, start
from tests.processes import Children
from trajectory_store import Column, RaggedArray, TrajectoryStore

VOCABULARY = 13
"""Tokens of the policy below: eleven characters, and two for the end and the padding."""


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A', 'tool': 'T'}[m.role] + ':' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
"""Of conversations with a tool."""


def response_template(function: str) -> dict[str, Any]:
    """The format of calls of a function with digits: what follows one of four characters is a call."""
    call = {"type": "function", "function": {"name": function, "arguments": {"digits": "{content}"}}}
    calls = {"open_pattern": "[+024]", "close": "<|im_end|>", "repeats": True, "content": "text", "transform": call}
    fields = {"tool_calls": calls, "content": {"content": "text", "close": "<|im_end|>"}}
    return {"defaults": {"role": "assistant"}, "start_anchor": "A:", "fields": fields}


def tiny(*, reward: RewardFunction = token_match, **changes: str) -> Pipeline:
    """A pipeline that collects; fields by path, with two underscores for the dot."""
    pipeline = Pipeline(
        name="tiny",
        policy=TinyPolicy(hidden_size=16, num_layers=1, num_heads=2),
        prompts=CopyDigits(num_digits=2),
        reward=reward,
        collect=Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=3),
        write=WritePath(estimator="dr_grpo"),
        buffer=Buffer(max_staleness=1),
        loss=GRPO(entropy_coeff=0.01),
        learn=Learn(steps=6, epochs=2, lr=1e-2, checkpoint_every=2),
    )
    return changed(pipeline, **changes)


def changed(pipeline: Pipeline, **changes: str) -> Pipeline:
    """The pipeline with other fields, by path, with two underscores for the dot."""
    return override_all(pipeline, [(path.replace("__", "."), text) for path, text in changes.items()])


def learn(
    pipeline: Pipeline, *, run_dir: Address, parent: int | None = None, on_event: EventHandler = ignore_events
) -> RunFinished:
    """The learner of a run of several processes."""
    return start(Run(pipeline=pipeline, run_dir=run_dir, joins="learn"), parent=parent, on_event=on_event)


def collect(pipeline: Pipeline, *, run_dir: Address, **given: Any) -> CollectorFinished:
    """A collector of such a run."""
    return collectors.collect(Run(pipeline=pipeline, run_dir=run_dir, joins="collect"), **given)


def offline(*stores: Path, batch: int = 8, steps: int = 4, replay: dict[str, Any] | None = None, **changes: str) -> Any:
    """The same pipeline over stores."""
    replayed = Replay(stores=tuple(map(str, stores)), **(replay or {}))
    sample = {"sample__batch_size": str(batch)} if batch else {}
    pipeline = dataclasses.replace(tiny(), replay=replayed)
    return changed(pipeline, **{"learn__steps": str(steps), **sample, **changes})


def trajectory(
    number: int,
    mask: list[int],
    reward: float,
    version: int = 0,
    *,
    tokens: list[int] | None = None,
    log_prob: float = -2.0,
    group_size: int = 2,
) -> TensorDict:
    """A trajectory of a group, as `extend` takes it; the policy produced the tokens where the mask is 1."""
    assistant = torch.tensor(mask, dtype=torch.bool)
    return TensorDict(
        {
            ("tokens", "full"): torch.arange(len(mask)) % 10 if tokens is None else torch.tensor(tokens),
            ("masks", "all_assistant_mask"): assistant,
            ("log_probs", "full"): torch.where(assistant, log_prob, torch.nan),
            "group_id": torch.tensor(number // group_size),
            "trajectory_id": torch.tensor(number),
            "policy_version": torch.tensor(version),
            "num_prompt_tokens": torch.tensor(mask.index(1)),
            "task_reward": torch.tensor(reward),
            ("next", "done"): torch.tensor(True),
        }
    )


def drawn_trajectory(number: int, reward: float | None = None) -> TensorDict:
    """One of a group of four, 3 to 9 tokens long, drawn by its number; so is its reward where none is given."""
    generator, length = torch.Generator().manual_seed(number), 3 + number * 5 % 7
    tokens = torch.randint(2, 12, (length,), generator=generator).tolist()
    if reward is None:
        reward = float(torch.rand((), generator=generator))
    return trajectory(number, [0, 0, *[1] * (length - 2)], reward, tokens=tokens, log_prob=-2.4, group_size=4)


def make_store(
    path: Path,
    *,
    groups: tuple[int, ...] = (4, 4, 4),
    seed: int = 0,
    lacks: tuple[str, ...] = (),
    extra: bool = False,
    rewards: list[float] | None = None,
    versions: list[int] | None = None,
    vocabulary: int = VOCABULARY,
    backend: Any = "memmap",
) -> Path:
    """Write graded groups of the given sizes, in one commit each.

    Args:
        path: the new store.
        groups: trajectories of each.
        seed: of tokens, lengths, log-probs and rewards.
        lacks: columns that are left out.
        extra: a column more per token and one per trajectory.
        rewards: in place of drawn ones.
        versions: in place of 0.
        vocabulary: token ids are below this.
        backend: of the store.
    """
    rng, at = np.random.default_rng(seed), 0
    more = [Column("top_k", "int16", ragged=True), Column("judge", "float64")] if extra else []
    with TrajectoryStore.create(path, trajectory_schema([TEMPERATURE, *more]), backend=backend) as store:
        for group, size in enumerate(groups):
            lengths = rng.integers(4, 9, size)
            total = int(lengths.sum())
            place = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            mask = place >= 2
            scores = np.where(mask, -rng.random(total), np.nan).astype(np.float32)
            ids = np.arange(at, at + size)
            graded = rng.integers(0, 2, size).astype(float) if rewards is None else rewards[at : at + size]
            columns: dict[str, Any] = {
                "input_ids": RaggedArray(rng.integers(0, vocabulary, total), lengths),
                "assistant_mask": RaggedArray(mask, lengths),
                "log_probs": RaggedArray(scores, lengths),
                "ref_log_probs": RaggedArray(scores + np.float32(0.25), lengths),
                "advantage": rng.normal(size=size).astype(np.float32),
                "task_reward": graded,
                "group_id": np.full(size, group),
                "trajectory_id": ids,
                "policy_version": np.zeros(size) if versions is None else versions[at : at + size],
                "num_prompt_tokens": np.full(size, 2),
                "temperature": np.ones(size, np.float32),
                "prompt": [f"prompt {group}"] * size,
                "completion": [f"completion {row}" for row in ids],
            }
            if extra:
                columns |= {"top_k": RaggedArray(np.arange(total) % 5, lengths), "judge": rng.normal(size=size)}
            columns = {name: value for name, value in columns.items() if name not in lacks}
            columns["policy_version"] = np.asarray(columns["policy_version"], np.int64)
            store.append(columns)
            at += size
    return path


def stored_rollout(rollout: int) -> StoredRollout:
    """What a collector records of a rollout of one trajectory."""
    return StoredRollout(
        rollout=rollout,
        policy_version=0,
        num_trajectories=1,
        num_failed=0,
        num_tokens=4,
        seconds=0.5,
        task_reward=0.0,
        created_at=0.0,
    )


def newest(run_dir: Path) -> Path:
    """The newest checkpoint."""
    return max((run_dir / "checkpoints").glob("step-*"))


def weights(run_dir: Path) -> bytes:
    """The newest checkpoint's."""
    folder = newest(run_dir)
    name = "adapter_model.safetensors" if (folder / "adapter_config.json").exists() else "model.safetensors"
    return (folder / name).read_bytes()


def qwen2(hidden_size: int = 16, **options: Any) -> Any:
    """A random Qwen2 with grouped queries, of 61 tokens and two layers if nothing else is said."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "max_position_embeddings": 128}
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**sizes | options)).eval()


def talker(seed: int = 0, *, hidden_size: int = 32, num_layers: int = 2, **options: Any) -> CausalLMPolicy:
    """A policy over digits and a few other characters; it ends its turns often enough."""
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "num_heads": 2}
    policy = scratch_policy("0123456789+UAT:\n", **sizes, seed=seed, **options)
    policy.tokenizer.chat_template = CHAT_TEMPLATE
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "head" not in name:
                parameter.mul_(3.0)
    return policy


class Calculator:
    """Adds up the digits of a turn; a turn without any ends the conversation."""

    answers = "tool"

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Show the prompt."""

    def step(self, turn: Turn) -> Step:
        """Answer with the sum."""
        rewards, digits = {"turns": 1 - len(turn.token_ids) / 8}, re.findall(r"\d", turn.text)
        if not digits or turn.finish_reason == "length":
            return Step(done=True, rewards=rewards)
        return Step([{"role": self.answers, "content": str(sum(map(int, digits)))}], rewards=rewards)


class PlainCalculator(Calculator):
    """The same without a chat template."""

    answers = "user"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """Two sums to ask for, through the chat template."""

    as_chat: bool = True

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return one of them."""
        return Prompt(text=("1+2", "3+1")[cursor % 2])


def sums_collector(policy: CausalLMPolicy, buffer: TrajectoryReplayBuffer, *, group_size: int) -> Collector:
    """A collector of conversations with the calculator, two groups in a rollout."""
    return Collector(
        policy=policy,
        prompts=Sums(),
        reward=environment_reward,
        buffer=buffer,
        config=Collect(prompts_per_rollout=2, group_size=group_size, max_turns=3, max_new_tokens=8),
        seed=3,
        environment=Calculator,
    )


def leave_memory(monkeypatch: pytest.MonkeyPatch, available: float) -> None:
    """Let the machine have so many bytes of host memory left for the copies of a checkpoint."""
    # What a machine has left is its kernel's matter; `available_bytes` itself is tested with files.
    monkeypatch.setattr(host_copies, "available_bytes", lambda: available)


class Clock:
    """Time that stands until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def count_kills(children: Children, pipeline: Pipeline, run_dir: Path, on_event: EventHandler = ignore_events) -> int:
    """Begin a run, or resume it, in a process after the other until one is not killed; return how many were."""

    def go_on() -> None:
        run(pipeline, run_dir=run_dir, resume=run_dir.exists(), on_event=on_event)

    kills = 0
    while (code := children.fork(go_on).wait()) == -signal.SIGKILL:
        kills += 1
    assert code == 0
    return kills
