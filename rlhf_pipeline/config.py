"""The definition of a pipeline: frozen dataclasses that describe everything and build nothing.

A definition is a function that returns a `Pipeline`. It is plain data, so it can be listed, printed, compared on
resume, written to the run folder and rebuilt in another process, all without importing torch.

>>> from rlhf_pipeline import Pipeline, override
>>> from rlhf_pipeline.data.prompts import CopyDigits
>>> from rlhf_pipeline.data.rewards import token_match
>>> pipeline = Pipeline(name="demo", policy=TinyPolicy(), prompts=CopyDigits(), reward=token_match)
>>> override(pipeline, "learn.lr", "3e-4").learn.lr
0.0003
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from rlhf_pipeline.data.prompts import Curriculum, EmptyPrompts, Mix, NoPrompts, PromptSource
from rlhf_pipeline.data.rewards import (
    EnvironmentReward,
    Reward,
    RewardFunction,
    environment_reward,
    has_columns,
    may_have_parts,
    no_reward,
    reward_weights,
    rewards_of,
)
from rlhf_pipeline.environments.environment import has_effects, rewards_of_environment
from rlhf_pipeline.environments.makers import code_of, maker_of
from rlhf_pipeline.settings import Settings, setting
from rlhf_pipeline.user_code.identity import identity_of

Estimator = Literal[
    "grpo", "dr_grpo", "mean", "rloo", "reinforce_pp", "reinforce_pp_baseline", "grpo_batch", "opo", "turn_grpo", "gdpo"
]
EVALUATION_FIGURES = ("reward", "reward_low")
"""The figures of an evaluation that are better if higher, in addition to pass@k and the named rewards."""


def passes_of(best: str | None) -> int | None:
    """Return the k of `pass@k`; None for any other figure.

    >>> passes_of("pass@8"), passes_of("reward"), passes_of("pass@two")
    (8, None, None)
    """
    k = re.fullmatch(r"pass@(\d+)", best or "")
    return int(k[1]) if k else None


Aggregation = Literal["token_mean", "sequence_mean", "group_mean", "sequence_sum", "dr_grpo"]
Objective = Literal["grpo", "cispo", "gspo", "sapo", "gmpo", "dppo", "vespo"]
KLEstimator = Literal["k3+", "k3", "k2"]
Strategy = Literal["fresh", "uniform", "recency", "priority", "group", "success", "variance", "mix", "anchored"]
Level = Literal["token", "sequence"]
MaskLevel = Literal["token", "sequence", "product"]


def _lora_rules(targets: str) -> list[tuple[bool, str]]:
    return [(all(name.strip() for name in targets.split(",")), f"lora_targets {targets!r} does not match any module.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyPolicy(Settings):
    """A small, untrained causal language model with one token per character."""

    alphabet: str = setting("0123456789=", help="The characters of the vocabulary.")
    hidden_size: int = setting(64, min=1, help="Width of the model; must be a multiple of `num_heads`.")
    num_layers: int = setting(2, min=1, help="Number of layers.")
    num_heads: int = setting(4, min=1, help="Number of attention heads per layer.")
    chat_template: str | None = setting(
        None,
        help="The tokenizer's chat template: the path of a Jinja file, or the template itself. Required for an "
        "environment with tools.",
    )
    response_template: dict[str, Any] | None = setting(
        None,
        help="The tokenizer's `response_template`, in the transformers format. It defines how tool calls are parsed.",
    )
    lora_rank: int = setting(
        0,
        min=0,
        help="Rank of the LoRA adapters; 0 trains all weights. See `PretrainedPolicy.lora_rank`.",
    )
    lora_alpha: float = setting(32.0, above=0, help="The adapters' output is scaled by `lora_alpha / lora_rank`.")
    lora_targets: str = setting(
        "all-linear",
        help="The modules that receive an adapter; see `PretrainedPolicy.lora_targets`.",
    )

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            *_lora_rules(self.lora_targets),
            (
                len(set(self.alphabet)) == len(self.alphabet) > 0,
                f"alphabet {self.alphabet!r} is empty or repeats a character.",
            ),
            (
                self.hidden_size % self.num_heads == 0,
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedPolicy(Settings):
    """A causal language model from a checkpoint folder, a GGUF file or the Hugging Face Hub."""

    path: str = setting(
        help="A folder written by `save_pretrained`, a GGUF file, or the name of a model on the Hub. Only a Hub name "
        "requires network access.",
    )
    chat_template: str | None = setting(
        None,
        help="A chat template that replaces the tokenizer's template: the path of a Jinja file, or the template "
        "itself.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        help="The model's compute dtype. `auto` is bfloat16 on CUDA and float32 elsewhere. With bfloat16, the "
        "optimizer keeps float32 master weights.",
    )
    lora_rank: int = setting(
        0,
        min=0,
        help="Rank of the LoRA adapters; 0 trains all weights. A rank above 0 trains only the adapters and requires "
        "peft. The reference model is then the policy with its adapters disabled, so no second model is needed.",
    )
    lora_alpha: float = setting(32.0, above=0, help="The adapters' output is scaled by `lora_alpha / lora_rank`.")
    lora_targets: str = setting(
        "all-linear",
        help="The modules that receive an adapter: `all-linear` (all linear modules except the head), or "
        "comma-separated names, for example `q_proj,v_proj`.",
    )

    def _rules(self) -> list[tuple[bool, str]]:
        return _lora_rules(self.lora_targets)


def _is_address(text: str) -> bool:
    """Return True for `http://HOST:PORT` without a path, so that the address contacted is the one given."""
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        return False
    plain = f"{url.scheme}://{url.netloc}" == text.rstrip("/") and "@" not in url.netloc
    return plain and url.scheme in ("http", "https") and bool(url.hostname) and port is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect(Settings):
    """How completions are sampled."""

    prompts_per_rollout: int = setting(
        16, min=1, help="Number of prompts per rollout. A complete group is sampled for each prompt."
    )
    group_size: int = setting(16, min=1, help="Number of completions per prompt.")
    dynamic: int = setting(
        1,
        min=1,
        help="Maximum number of sampling rounds per rollout, each with `prompts_per_rollout` prompts (dynamic "
        "sampling; DAPO, arXiv:2503.14476). The rollout keeps the first `prompts_per_rollout` groups whose rewards "
        "are not all equal. If there are fewer such groups after the last round, groups with equal rewards fill the "
        "rollout. 1 keeps every group.",
    )
    dynamic_by: str | None = setting(
        None,
        help="The name of the reward or component that must differ within a group for `dynamic` to keep the group; "
        "None uses the total reward.",
    )
    max_new_tokens: int = setting(
        64,
        min=1,
        help="Maximum number of tokens in a completion; a longer completion is truncated and has the finish reason "
        "`length`. With an environment, the limit applies to each turn.",
    )
    max_turns: int = setting(8, min=1, help="With an environment: maximum number of turns in a conversation.")
    max_row_tokens: int | None = setting(
        None,
        min=2,
        help="With an environment: maximum total number of tokens in the prompt, the completions and the replies; None "
        "uses the model's context length.",
    )
    step_timeout_s: float | None = setting(
        60.0,
        above=0,
        help="With an environment: number of seconds after which a call to it fails with the reason `timeout`; None "
        "sets no limit.",
    )
    reply_after: int = setting(
        32,
        min=0,
        help="For an environment with `async def step` or `parallel = True`: number of sampling steps (one token per "
        "slot) between the end of a turn and the step that uses the reply. Calls to the environment run in the "
        "meantime, and sampling waits only for replies that are due. Which rows share a batch therefore depends only "
        "on the data, not on the duration of the calls.",
    )
    call_threads: int = setting(
        256,
        min=1,
        help="Maximum number of threads for reward functions, environments and tools; all calls of a "
        "conversation run in one thread.",
    )
    live_conversations: int | None = setting(
        None,
        min=1,
        help="With an environment: maximum number of conversations, and therefore of environments, that exist at the "
        "same time. The conversations of a rollout run in batches of this size. None starts all conversations at once.",
    )
    history: Literal["sampled", "rewritten"] = setting(
        "sampled",
        help="How earlier turns of a conversation are passed to the policy if the chat template rewrites them, for "
        "example by removing the thinking from them. `sampled` passes the tokens that the policy sampled, and "
        "continues the row. `rewritten` passes the output of the template, and starts a new row of the episode if the "
        "output differs from the current row. See docs/environments.md.",
    )
    max_reply_tokens: int | None = setting(
        None,
        min=1,
        help="With an environment: maximum number of tokens in a reply; a longer reply is truncated and marked with ` "
        "[cut]`. With None, a reply that does not fit in the row ends the conversation.",
    )
    max_call_errors: int | None = setting(
        4,
        min=1,
        help="With tools: maximum number of failed calls (malformed calls, calls to unknown tools, and calls with "
        "wrong arguments) in a conversation. The policy receives each error; the error that reaches the limit ends the "
        "conversation with the finish reason `calls`. With None, only `max_turns` limits the number of failed calls.",
    )
    retries: int = setting(
        0,
        min=0,
        help="Maximum number of retries of a failed reward call, or of a conversation that ended with an "
        "infrastructure failure (a timeout, a tool error or an abort by the engine). The failures are stored with the "
        "trajectory. Not supported for an environment with `has_effects`.",
    )
    alarm_failed: float = setting(
        0.1,
        min=0,
        max=1,
        help="Report a rollout if more than this share of its trajectories have no trusted reward.",
    )
    temperature: float = setting(
        1.0,
        above=0,
        help="Sampling temperature. The behaviour log-probs are computed at this temperature.",
    )
    top_k: int = setting(
        0,
        min=0,
        help="Sample from the `top_k` most probable tokens; 0 uses all tokens. `top_k`, `top_p` and `min_p` require "
        "`engine=slots`. With any of them, the store also contains the log of the total probability of the "
        "tokens from which each token was sampled (`support_log_mass`).",
    )
    top_p: float = setting(
        1.0,
        above=0,
        max=1,
        help="Sample from the smallest set of most probable tokens whose total probability is at least this value; 1 "
        "uses all tokens.",
    )
    min_p: float = setting(
        0.0,
        min=0,
        max=1,
        help="Sample from the tokens whose probability is at least this share of the largest probability; 0 uses all "
        "tokens.",
    )
    stop: tuple[str, ...] = setting(
        (),
        help="Strings that end a completion. The completion ends at the token that completes the string. Every engine "
        "supports stop strings.",
    )
    keep_stop: bool = setting(
        True,
        help="Whether the text passed to the reward function includes the stop string; the tokens always include it.",
    )
    prefill: str = setting(
        "",
        help="Text at the beginning of every completion, for example `<think>`; it also applies to evaluations. The "
        "policy continues this text. Reward functions receive it, but the loss excludes it. Not supported with an "
        "environment.",
    )
    num_slots: int = setting(64, min=1, help="Number of completions generated in parallel.")
    engine: str = setting(
        "slots",
        help="The sampling engine. `slots` is built in. `vllm` requires the extra `vllm`. Both run in the collector's "
        "process. `http://HOST:PORT` is the address of a vLLM server. docs/engines.md describes how to start "
        "each engine, and how reproducible its results are.",
    )
    engine_memory: float = setting(
        0.5,
        above=0,
        below=1,
        help="For `engine=vllm`: share of the GPU's memory for the engine's weights and cache; the learner uses the "
        "rest.",
    )
    refresh_weights_every: int = setting(
        0,
        min=0,
        help="For a collector that runs in parallel with a learner: number of sampled tokens per slot between two "
        "checks for newer weights; 0 loads weights only between rollouts. Unfinished completions continue with "
        "the newer weights. Each log-prob is computed with the weights that sampled its token. The cache of the "
        "prompt and the earlier tokens is recomputed with the newer weights. The store records which weights "
        "sampled each token. With a vLLM server, the collector checks twice per second instead.",
    )

    reward_concurrency: int = setting(
        16,
        min=1,
        help="Maximum number of concurrent reward calls during sampling; use 1 if the reward functions are not "
        "re-entrant.",
    )
    reward_timeout_s: float | None = setting(
        300.0,
        above=0,
        help="Number of seconds after which a reward call fails with the reason `timeout`; None sets no limit.",
    )
    skip_special_tokens: bool = setting(
        False,
        help="Remove special tokens such as `<think>` from the stored text and from the text passed to reward "
        "functions. The token that ends a completion is never part of the text.",
    )

    @property
    def rollout_size(self) -> int:
        """The number of trajectories in one rollout."""
        return self.prompts_per_rollout * self.group_size

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be drawn."""
        return bool(self.top_k) or self.top_p < 1 or self.min_p > 0

    def _rules(self) -> list[tuple[bool, str]]:
        is_engine = self.engine in ("slots", "vllm") or _is_address(self.engine)
        wrong = f"engine is {self.engine!r}; it must be slots, vllm, or an address like http://127.0.0.1:8000."
        return [
            (is_engine, wrong),
            (
                not self.is_truncated or self.engine == "slots",
                f"top_k, top_p and min_p need engine=slots, but engine is {self.engine}. vLLM does not report the "
                "probability mass of the truncated support, without which ratios would be wrong.",
            ),
            (all(self.stop), "a stop string is empty."),
            (
                self.dynamic > 1 or self.dynamic_by is None,
                f"dynamic_by is {self.dynamic_by!r}, but dynamic is 1, which keeps every group. Set dynamic to the "
                "maximum number of rounds per rollout.",
            ),
            (
                self.dynamic == 1 or self.group_size > 1,
                f"dynamic is {self.dynamic}: it selects groups whose rewards differ, but group_size is 1.",
            ),
        ]


def close_policy_rule(min_group_size: int | None, group_timeout_s: float | None) -> tuple[bool, str]:
    """Return whether a group may close early by these arguments, and the message if they contradict each other."""
    return (
        (min_group_size is None) == (group_timeout_s is None),
        "min_group_size and group_timeout_s must be set together: after group_timeout_s seconds, a group may close "
        "with min_group_size members.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePath(Settings):
    """How a completed trajectory is processed before it is stored."""

    estimator: Estimator | Callable[..., Any] = setting(
        "grpo",
        help="How the returns of a group are converted to advantages; the formulas are in "
        "`rlhf_pipeline.functional.advantage`. `reinforce_pp`, `reinforce_pp_baseline` and `grpo_batch` (TRL's "
        "`scale_rewards=batch`) divide the centred returns by a standard deviation over the rollout or, with `replay`, "
        "over all replayed trajectories. `turn_grpo` computes an advantage for each turn of a "
        "conversation from the rewards of that turn and later turns. `gdpo` normalises each named reward within each "
        "group, computes the weighted sum of the results, and normalises this sum over the rollout. A custom function "
        "(`EstimatorFunction` in `rlhf_pipeline.functional.advantage`) is also accepted; on the command "
        "line, specify `FILE.py:NAME`.",
    )
    turn_discount: float = setting(
        1.0,
        min=0,
        max=1,
        help="With `turn_grpo`: the advantage of a turn includes the advantage of the next turn, multiplied by this "
        "factor.",
    )
    episode_return: Literal["sum", "verl", "skyrl"] = setting(
        "sum",
        help="How the return of an episode with several rows is computed. All rows of the episode have the same "
        "advantage. `sum`: the rewards of all rows, minus the KL penalties of all tokens. `verl`: the rewards of the "
        "last row, minus the KL penalties of its tokens. `skyrl`: the reward of the last turn, minus the KL penalties "
        "of its tokens. For an episode with one row and one turn, all three values give the same return.",
    )
    kl_coef: float = setting(
        0.0,
        min=0,
        help="Weight of the KL penalty (estimator k1) in the reward. With 0, the reward needs no reference model.",
    )
    kl_target: float | None = setting(
        None,
        above=0,
        help="Target of the adaptive controller of `kl_coef`: the mean KL per trajectory, in nats. None keeps "
        "`kl_coef` constant.",
    )
    kl_horizon: int = setting(10_000, min=1, help="Horizon of the adaptive controller of `kl_coef`, in trajectories.")
    zero_variance: Literal["keep", "drop", "mark"] = setting(
        "keep",
        help="How a group is treated if its returns are all equal. With a KL penalty, returns that differ only by "
        "rounding errors count as equal. `keep` stores the group, `drop` discards it, and `mark` stores it with "
        "priority 0, so samplers skip it.",
    )
    min_group_size: int | None = setting(
        None,
        min=1,
        help="After `group_timeout_s`, a group with at least this number of members closes early: it stops waiting for "
        "further members. None waits for all members.",
    )
    group_timeout_s: float | None = setting(
        None,
        min=0,
        help="Number of seconds, from the arrival of a group's first member, after which the group may close early. "
        "None disables early closing. Requires `min_group_size`.",
    )

    @property
    def drops_groups(self) -> bool:
        """Whether groups without spread are excluded from the store."""
        return self.zero_variance == "drop"

    @property
    def marks_groups(self) -> bool:
        """Whether groups without spread are stored with a priority of 0, so that samplers skip them."""
        return self.zero_variance == "mark"

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.kl_target is None or self.kl_coef > 0,
                "kl_target needs a kl_coef above 0 as the initial value.",
            ),
            (
                self.estimator != "turn_grpo" or self.kl_coef == 0,
                f"kl_coef is {self.kl_coef}, a penalty in the reward of a complete trajectory, but "
                "estimator=turn_grpo compares turns. Set write.kl_coef=0 and loss.kl_to_ref_coeff.",
            ),
            (
                self.estimator != "gdpo" or self.kl_coef == 0,
                f"kl_coef is {self.kl_coef}, a penalty in the sum of the rewards, but estimator=gdpo uses the "
                "named rewards. Set write.kl_coef=0 and loss.kl_to_ref_coeff.",
            ),
            close_policy_rule(self.min_group_size, self.group_timeout_s),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer(Settings):
    """The trajectory store, and the maximum age of the trajectories that the learner uses."""

    backend: Literal["memmap", "zarr"] = setting(
        "memmap",
        help="The storage format: `memmap` (raw files, for training) or `zarr` (compressed objects).",
    )
    durability: Literal["process", "power", "group"] = setting(
        "process",
        help="The failures that an acknowledged trajectory survives. With `process`, it survives `kill -9`. With "
        "`power` and `group`, it also survives a power loss.",
    )
    max_trajectories: int | None = setting(
        None,
        min=1,
        help="Maximum number of trajectories; the oldest are evicted first. None keeps all trajectories.",
    )
    max_bytes: int | None = setting(
        None,
        min=1,
        help="Maximum size of the run folder on disk, in bytes; with None, only the free space limits the size. The "
        "run warns one day before its folder would reach the limit at the current rate of growth. If another step and "
        "its checkpoint would exceed the limit, the run saves a checkpoint and stops.",
    )
    max_staleness: int = setting(
        0,
        min=0,
        help="Maximum age of a trajectory in a batch, in optimizer steps: the learner's policy version minus the "
        "oldest policy version that sampled a token of the trajectory. Steps on the newest rollout are always allowed.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Settings):
    """How an optimizer step selects its batch from the stored trajectories that `Buffer.max_staleness` allows.

    The batch is a function of the stored trajectories, the seed and the step, and the ledger records it.
    """

    strategy: Strategy | Callable[..., Any] = setting(
        "fresh",
        help="`fresh` uses all trajectories within the age limit. Without `replay`, these are the trajectories of the "
        "newest rollout. With `replay`, `fresh` uses every trajectory once per epoch, `batch_size` trajectories per "
        "step. The order changes with each epoch, and groups are kept together. The other strategies draw "
        "`batch_size` trajectories. `uniform` draws with equal probability. `recency` prefers recent trajectories. "
        "`priority` prefers recent trajectories with a large absolute advantage. `group` draws complete groups. "
        "`success` draws complete groups with a medium success rate. `variance` draws complete groups whose rewards "
        "vary. `mix` draws part of the batch from the newest rollout and the rest in the same way as `recency`. "
        "`anchored` uses the complete newest rollout in the first step on that rollout. In the remaining steps (see "
        "`learn.epochs`), `anchored` draws a batch in the same way as `recency`. See `rlhf_pipeline.buffer.samplers`. "
        "A custom function (`StrategyFunction` in the same module) is also accepted; on the command line, specify "
        "`FILE.py:NAME`.",
    )
    batch_size: int | None = setting(
        None,
        min=1,
        help="Number of trajectories per step; None uses the number of trajectories in a rollout. With `fresh`, it can "
        "be set only if `replay` is set; otherwise, use `learn.minibatches`.",
    )
    tau: float | None = setting(
        None,
        above=0,
        help="Age, in optimizer steps, at which the probability of drawing a trajectory has fallen to 1/e of its "
        "initial value; None ignores the age.",
    )
    alpha: float = setting(
        1.0,
        min=0,
        help="Exponent of the absolute advantage (for `priority`) or of the reward variance (for `variance`).",
    )
    fresh_fraction: float = setting(
        0.5,
        min=0,
        max=1,
        help="For `mix`: the share of a batch that comes from the newest rollout.",
    )
    max_uses: int | None = setting(
        None, min=1, help="Maximum number of steps that can use the same trajectory; None sets no limit."
    )
    min_ess: float | None = setting(
        None,
        above=0,
        max=1,
        help="Threshold for the effective sample size of the trajectories of each age, as a share of the number of "
        "their tokens. If the size is below the threshold, these trajectories have a lower weight in the loss; see "
        "`rlhf_pipeline.learner.ess_guard`. Requires an additional forward pass for a stale batch. None weights all "
        "trajectories equally.",
    )
    skip_below_ess: float = setting(
        0.1,
        min=0,
        max=1,
        help="Exclude the trajectories of a given age from the loss if their effective sample size, as a share of the "
        "number of their tokens, is below this value. Requires `min_ess`.",
    )

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (self.strategy != "recency" or self.tau is not None, "strategy=recency needs tau, for example tau=8."),
            (
                self.min_ess is None or self.skip_below_ess <= self.min_ess,
                f"min_ess ({self.min_ess}) must be between skip_below_ess ({self.skip_below_ess}) and 1.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay(Settings):
    """Learn from stores only, without sampling from the policy.

    The selected trajectories are first copied into the store of the run, through the write path if reference or
    behaviour log-probs or advantages are missing. The source stores are never changed.
    """

    stores: tuple[str, ...] = setting(
        (),
        help="The stores or run folders to learn from; `rlhf-pipeline replay STORE...` sets this field.",
    )
    weights: tuple[float, ...] = setting(
        (),
        above=0,
        help="The share of each store in a batch. Without weights, all stores are treated as one store.",
    )
    filters: tuple[str, ...] = setting(
        (),
        help="Conditions that a trajectory must meet, for example `reward>=0.5`, `version<100`, `num_tokens<=512`, "
        "`date>=2026-01-31`.",
    )
    epochs: float | None = setting(
        None,
        above=0,
        help="Stop the run when the average number of uses per trajectory reaches `epochs`. With None, only "
        "`learn.steps` limits the run.",
    )
    skip_damaged: bool = setting(
        False,
        help="Skip and count trajectories that do not match their checksums. If false, any such trajectory causes an "
        "error.",
    )
    recorded_order: bool = setting(
        False,
        help="Repeat the steps of the run that filled the store: step k selects, by policy version, the same "
        "trajectories as step k of that run. Requires exactly one store.",
    )

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                not self.weights or not self.stores or len(self.weights) == len(self.stores),
                f"weights must be empty or contain one value per store: expected {len(self.stores)}, got "
                f"{len(self.weights)}.",
            ),
            (
                not self.recorded_order or (len(self.stores) <= 1 and self.epochs is None),
                "recorded_order needs exactly one store and epochs=none.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate(Settings):
    """Evaluation, with the reward functions of the definition, on prompts that are never used for training."""

    prompts: PromptSource = setting(factory=NoPrompts, help="The source of the evaluation prompts.")
    every: int = setting(10, min=1, help="Number of optimizer steps between two evaluations.")
    num_prompts: int = setting(
        64,
        min=1,
        help="Number of prompts. An evaluation uses the first prompts of the source in a fixed order, or all prompts "
        "if the source has fewer.",
    )
    group_size: int = setting(1, min=1, help="Number of completions per prompt; pass@k needs at least k completions.")
    temperature: float = setting(1.0, min=0, help=("Sampling temperature; 0 selects the most probable token."))
    top_k: int | None = setting(
        None,
        min=0,
        help="Sample from the `top_k` most probable tokens; 0 uses all tokens, and None uses `collect.top_k`.",
    )
    top_p: float | None = setting(
        None,
        above=0,
        max=1,
        help=(
            "Sample from the smallest set of most probable tokens whose total probability is at least this value; "
            "None uses `collect.top_p`."
        ),
    )
    min_p: float | None = setting(
        None,
        min=0,
        max=1,
        help="Sample from the tokens whose probability is at least this share of the largest probability; None uses "
        "`collect.min_p`.",
    )
    max_new_tokens: int | None = setting(
        None, min=1, help="Maximum number of tokens in a completion; None uses `collect.max_new_tokens`."
    )
    success: str | None = setting(
        None,
        help=(
            "The name of the reward or component that determines whether a completion is correct; None uses the total "
            "reward."
        ),
    )
    success_at: float = setting(
        1.0, help="The minimum reward at which pass@k counts a completion as correct; see `success`."
    )
    best: str | None = setting(
        None,
        help="The metric by which the best weights are selected: `reward` (the mean), `pass@K` for any K up to "
        "`group_size`, or the name of a reward or component. None uses `reward`. With several named evaluations, "
        "the best weights are selected by the one that specifies `best`, or by the first one if none does.",
    )
    at_start: bool = setting(True, help="Whether to evaluate the initial weights of the run.")
    keep_best: bool = setting(
        True,
        help="Save a checkpoint of the best evaluated weights, and keep this checkpoint in addition to the newest "
        "checkpoints. The best weights have the highest value of the metric that `best` specifies; in a tie, the "
        "earliest are kept.",
    )

    def sampling(self, collect: Collect) -> Collect:
        """Return the sampling settings of the evaluation: those for learning, with its own values if they are set."""
        overrides = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p", "max_new_tokens")}
        overrides = {name: value for name, value in overrides.items() if value is not None}
        if not self.temperature:
            overrides |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        return replace(collect, group_size=self.group_size, dynamic=1, dynamic_by=None, **overrides)

    def _rules(self) -> list[tuple[bool, str]]:
        k = passes_of(self.best)
        return [
            (
                k is None or 1 <= k <= self.group_size,
                f"best is {self.best!r}, but group_size is {self.group_size}, so k must be at most "
                f"{self.group_size}. Set group_size={k}, or best='pass@{self.group_size}'.",
            ),
        ]


def _asking_nothing(evaluate: Any) -> Any:
    """Return evaluations with empty prompts if they have none, for an environment that supplies the prompts."""
    if isinstance(evaluate, Mapping):
        return {name: _asking_nothing(part) for name, part in cast("Mapping[str, Any]", evaluate).items()}
    if isinstance(evaluate, Evaluate) and isinstance(evaluate.prompts, NoPrompts):
        return replace(evaluate, prompts=EmptyPrompts())
    return evaluate


def evaluation_sets(evaluate: Evaluate | Mapping[str, Evaluate] | None) -> dict[str, Evaluate]:
    """Return the evaluations of a definition by the name of their set; a single evaluation has an empty name."""
    if evaluate is None:
        return {}
    return {"": evaluate} if isinstance(evaluate, Evaluate) else dict(evaluate)


def deciding_set(sets: Mapping[str, Evaluate]) -> str | None:
    """Return the name of the set that selects the best weights: the set that specifies `best`, otherwise the first."""
    keeping = [name for name, settings in sets.items() if settings.keep_best]
    return next((name for name in keeping if sets[name].best is not None), keeping[0] if keeping else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DPPO(Settings):
    """The trust region of `objective=dppo` around the behaviour probability of each token.

    Source: arXiv:2602.04879, equations 11 to 14; `functional.policy_loss.dppo_loss` has the formula.
    """

    divergence: Literal["tv", "kl"] = setting(
        "tv",
        help="The divergence between the policy and the behaviour policy over the two outcomes {sampled token, any "
        "other token}: total "
        "variation (`tv`), or the KL divergence from the behaviour policy to the policy (`kl`).",
    )
    low: float | None = setting(
        None,
        above=0,
        help="Maximum divergence for a token that has become less likely since sampling. None uses 0.2 for `tv` and "
        "0.05 for `kl`.",
    )
    high: float | None = setting(
        None,
        above=0,
        help="Maximum divergence for a token that has become more likely since sampling. None uses 0.2 for `tv` and "
        "0.05 for `kl`.",
    )
    mask: Literal["harmful", "both"] = setting(
        "harmful",
        help="Which tokens outside the trust region are excluded from the policy loss. `harmful` excludes the tokens "
        "whose gradient would increase the divergence, as in the DPPO paper (arXiv:2602.04879). `both` excludes all "
        "tokens outside the trust region.",
    )
    ratio_cap: float | None = setting(
        20.0,
        min=1,
        help="A token's gradient is weighted by the ratio of the policy's probability to the behaviour policy's "
        "probability; this value is the upper bound on the ratio. verl uses 20. None sets no bound, as in the "
        "DPPO paper (arXiv:2602.04879).",
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest divergence below and above the behaviour probability."""
        usual = 0.2 if self.divergence == "tv" else 0.05
        return usual if self.low is None else self.low, usual if self.high is None else self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class VESPO(Settings):
    """The weight function of `objective=vespo`: `exp(scale + power log w - scale w)`; `w` is the importance weight.

    Source: arXiv:2602.10693; the defaults are TRL's. `functional.policy_loss.vespo_loss` has the formula.
    """

    power_positive: float = setting(2.0, min=0, help="The exponent of `w` if the advantage is at least 0.")
    scale_positive: float = setting(
        3.0, above=0, help="The rate at which the weight decreases for large `w` if the advantage is at least 0."
    )
    power_negative: float = setting(3.0, min=0, help="The exponent of `w` if the advantage is below 0.")
    scale_negative: float = setting(
        2.0, above=0, help="The rate at which the weight decreases for large `w` if the advantage is below 0."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(Settings):
    """The policy loss, and its KL and entropy terms."""

    objective: Objective | Callable[..., Any] = setting(
        "grpo",
        help="`grpo`: PPO's clip on token ratios. `cispo`: CISPO's clipped weight. `gspo`: PPO's clip on sequence "
        "ratios; set `clip_low` and `clip_high` to about 3e-4. `sapo`: SAPO's smooth gate without a clip. "
        "`gmpo`: the geometric mean of ratios clipped in log space; set `clip_low` and `clip_high` to about 0.4, and "
        "use `aggregation=sequence_mean`. `dppo`: a mask for tokens on which the policy and the behaviour policy "
        "diverge; see `loss.dppo`. `vespo`: a smooth function of a completion's importance weight; see "
        "`loss.vespo`. A custom function (`ObjectiveFunction` in `rlhf_pipeline.functional.objectives`) is also "
        "accepted; on the command line, specify `FILE.py:NAME`.",
    )
    clip_low: float | None = setting(
        None,
        above=0,
        below=1,
        help="The ratio of the policy's probability to the behaviour policy's probability is clipped to at least "
        "`1 - clip_low`. None uses 0.2, except for `cispo`, which then has no lower clip, as in the CISPO paper.",
    )
    clip_high: float = setting(
        0.2,
        above=0,
        help="The ratio of the policy's probability to the behaviour policy's probability is clipped to at "
        "most `1 + clip_high`.",
    )
    aggregation: Aggregation = setting(
        "token_mean",
        help="How token losses are aggregated. `token_mean`: the mean over all tokens. `sequence_mean`: the token "
        "mean of each completion, averaged over completions. `group_mean`: the token mean of each group, averaged "
        "over groups, so every prompt has the same weight. `sequence_sum`: the token sum of each completion, averaged "
        "over completions. `dr_grpo` (Dr. GRPO): `sequence_sum` divided by a fixed length.",
    )
    dppo: DPPO = setting(factory=DPPO, help="The trust region of `objective=dppo`.")
    vespo: VESPO = setting(factory=VESPO, help="Parameters of the weight function that `objective=vespo` uses.")
    entropy_coeff: float = setting(0.0, min=0, help="Weight of the entropy bonus in the objective.")
    kl_to_ref_coeff: float = setting(
        0.0,
        min=0,
        help="Weight of the KL term in the loss, which compares the policy with the reference model. The term is "
        "independent of the KL penalty in the reward (`write.kl_coef`).",
    )
    kl_estimator: KLEstimator = setting(
        "k3+",
        help="Estimator of the KL term in the loss; the formulas are in `rlhf_pipeline.functional.kl`. `k3+` combines "
        "the value of k3 with the gradient of k2, which is correct on-policy.",
    )
    kl_importance_weight: bool = setting(
        False,
        help="For stale trajectories: weight the KL term in the loss by the ratio of the policy's probability to the "
        "behaviour policy's probability.",
    )
    dual_clip: float | None = setting(
        None,
        above=1,
        help="If the advantage A is negative, the loss is at most `-dual_clip * A`. arXiv:1912.09729 uses 3.",
    )
    delta: float | None = setting(
        None,
        above=1,
        help="Upper bound on the ratio in the unclipped term of PPO's loss; must be above `1 + clip_high`.",
    )
    tis_cap: float | None = setting(
        None,
        above=0,
        help="Truncated importance sampling: weight the policy loss by `min(exp(learner log-prob - behaviour "
        "log-prob), tis_cap)`. The learner's log-probs of a trajectory are computed before the first step that uses "
        "the trajectory. The ratio that the loss clips is computed from these log-probs instead of "
        "the behaviour log-probs. Requires an additional forward pass per trajectory.",
    )
    tis_level: Level = setting(
        "token",
        help="For `tis_cap`: `token` uses one weight per token. `sequence` uses one weight per completion, computed "
        "from the product of the ratios of its tokens.",
    )
    tis_floor: float | None = setting(None, min=0, help="Lower bound on the `tis_cap` weight.")
    icepop: MaskLevel | None = setting(
        None,
        help="Weight each token (`token`) or each completion (`sequence`, `product`) in the policy loss by the ratio "
        "`exp(learner log-prob - behaviour log-prob)`. The weight is 0 if the ratio is not between `icepop_low` and "
        "`icepop_high`. The ratio of a completion is the geometric mean (`sequence`) or the product (`product`) over "
        "its tokens. If `tis_cap` is also set, the `tis_cap` weight is used within the bounds.",
    )
    icepop_low: float = setting(0.5, min=0, help="Lower bound on the ratio; see `icepop`.")
    icepop_high: float = setting(5.0, above=0, help="Upper bound on the ratio; see `icepop`.")
    off_policy_threshold: float | None = setting(
        None,
        above=0,
        help="Exclude a completion with a negative advantage from the policy loss if the mean of `behaviour log-prob - "
        "current log-prob` over its tokens is above this value, in nats (DeepSeek-V3.2). Requires evaluating "
        "the model's output head twice.",
    )
    top_entropy_quantile: float = setting(
        1.0,
        above=0,
        max=1,
        help="Share of a step's tokens that the policy loss includes; the tokens with the highest entropy are "
        "selected. arXiv:2506.01939 uses 0.2. The other tokens still count in averages, as in TRL. Requires an "
        "additional forward pass and a single process.",
    )
    clip_cov: float | None = setting(
        None,
        above=0,
        max=1,
        help="Share of a step's tokens to exclude from the policy loss. If the share is less than one token, one token "
        "is excluded. The excluded tokens are drawn from the tokens whose covariance of log-prob and advantage is "
        "between `clip_cov_low` and `clip_cov_high`. arXiv:2505.22617 uses 0.0002. The other tokens keep their weight, "
        "as in verl. Only for `objective=grpo`. Requires an additional forward pass and a single process.",
    )
    clip_cov_low: float = setting(1.0, help="Lower bound on the covariance; see `clip_cov`.")
    clip_cov_high: float = setting(5.0, help="Upper bound on the covariance; see `clip_cov`.")
    sapo_tau_positive: float = setting(1.0, above=0, help="For `sapo`: steepness of the gate for a positive advantage.")
    sapo_tau_negative: float = setting(
        1.05, above=0, help="For `sapo`: steepness of the gate for a negative advantage or an advantage of 0."
    )

    @property
    def clip_epsilon(self) -> tuple[float, float]:
        """The distances below and above 1 at which the ratio is clipped; 1 below means no lower clip."""
        none = 1.0 if self.objective == "cispo" else 0.2
        return (none if self.clip_low is None else self.clip_low), self.clip_high

    @property
    def reads_reference(self) -> bool:
        """Whether the loss has a KL term against the reference."""
        return self.kl_to_ref_coeff > 0

    @property
    def chooses_tokens(self) -> bool:
        """Whether tokens are chosen from all tokens of a step."""
        return self.top_entropy_quantile < 1 or self.clip_cov is not None

    @property
    def corrects_the_sampler(self) -> bool:
        """Whether the loss needs the learner's log-probs in addition to the behaviour log-probs."""
        return self.tis_cap is not None or self.icepop is not None

    def _rules(self) -> list[tuple[bool, str]]:
        bounded = self.dual_clip is not None or self.delta is not None
        return [
            (
                self.delta is None or self.delta > 1 + self.clip_high,
                f"delta is {self.delta}; it must be above 1 + clip_high, {1 + self.clip_high}.",
            ),
            (
                not bounded or callable(self.objective) or self.objective in ("grpo", "gspo"),
                "dual_clip and delta apply only to PPO's clip, which "
                f"objective={self.objective} does not use. Set both to none.",
            ),
            (
                not self.corrects_the_sampler or self.objective not in ("dppo", "vespo"),
                f"objective={self.objective} already corrects for the behaviour policy, so tis_cap and icepop would "
                "correct a second time. Set both to none.",
            ),
            (
                self.tis_floor is None or (self.tis_cap is not None and self.tis_floor < self.tis_cap),
                f"tis_floor is {self.tis_floor}; it must be below tis_cap, {self.tis_cap}.",
            ),
            (
                self.icepop_low < self.icepop_high,
                f"icepop_low is {self.icepop_low}; it must be between 0 and icepop_high, {self.icepop_high}.",
            ),
            (
                self.clip_cov is None or self.objective == "grpo",
                f"clip_cov needs objective=grpo, but the objective is {self.objective}.",
            ),
            (
                self.clip_cov_low < self.clip_cov_high,
                f"clip_cov_low is {self.clip_cov_low}; it must be below clip_cov_high, {self.clip_cov_high}.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Learn(Settings):
    """The optimizer and the training loop."""

    steps: int = setting(100, min=1, help="Maximum number of optimizer steps.")
    epochs: int = setting(
        1,
        min=1,
        help="Number of passes over each rollout before the next one is collected. A pass is one optimizer step on the "
        "complete rollout unless `minibatches` or `sample` changes this.",
    )
    minibatches: int = setting(
        1,
        min=1,
        help="Number of random, disjoint parts into which each pass divides a rollout, with one optimizer step per "
        "part. Only for `sample.strategy=fresh`. With `replay` and no `sample.batch_size`, a step uses as many "
        "trajectories as one part of a rollout contains.",
    )
    episode_weight: Literal["one", "rows"] = setting(
        "one",
        help="Whether an episode with several rows counts as one trajectory in the loss (`one`), or each of its rows "
        "counts as one trajectory, as in verl and SkyRL (`rows`); see `token_weights` in "
        "`rlhf_pipeline.functional.aggregation`.",
    )
    lr: float = setting(1e-3, above=0, help="Learning rate of AdamW.")
    warmup_steps: int = setting(
        0, min=0, help="Number of optimizer steps over which the learning rate increases from 0."
    )
    warmup_ratio: float = setting(
        0.0,
        min=0,
        below=1,
        help="Length of the warm-up as a share of the steps until the end of the schedule, rounded up to whole steps. "
        "The schedule ends at `lr_decay_steps` if it is set, otherwise at `steps`. Set only one of "
        "`warmup_steps` and `warmup_ratio`.",
    )
    min_lr: float = setting(0.0, min=0, help="The final value of a decreasing learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        help="The learning rate after the warm-up: constant, or decreasing to `min_lr` linearly or along a half "
        "cosine.",
    )
    lr_decay_steps: int | None = setting(
        None,
        min=1,
        help="Optimizer step at which a decreasing learning rate reaches its final value; None uses `steps + 1`. "
        "Set this field if the run may be extended later, so that an extension does not change the "
        "learning rate of earlier steps.",
    )
    weight_decay: float = setting(
        0.0,
        min=0,
        help="Decoupled weight decay of AdamW. It does not apply to norms, biases or position embeddings.",
    )
    beta1: float = setting(0.9, min=0, below=1, help="Decay rate of AdamW's first moment.")
    beta2: float = setting(0.95, min=0, below=1, help="Decay rate of AdamW's second moment.")
    eps: float = setting(1e-8, above=0, help="The constant that is added to the square root of AdamW's second moment.")
    max_grad_norm: float = setting(
        1.0, above=0, help="Maximum gradient norm. A larger gradient is scaled down to this norm."
    )
    optimizer: Literal["adamw", "adamw_8bit"] = setting(
        "adamw",
        help="The optimizer. `adamw_8bit` stores the moments in 8 bits and requires torchao or bitsandbytes.",
    )
    offload_optimizer: bool = setting(
        False,
        help="Keep master weights and moments in host memory, and run the optimizer step on the CPU.",
    )
    activation_checkpointing: bool = setting(
        False,
        help="Recompute each layer in the backward pass. This saves memory but requires a third more computation.",
    )
    reference_every: int = setting(
        0,
        min=0,
        help="Number of optimizer steps between two updates of the reference model; 0 keeps it frozen.",
    )
    reference_rate: float = setting(
        1.0,
        above=0,
        max=1,
        help="How far an update moves the reference model towards the policy: 1 copies the policy, and 0.01 with "
        "`reference_every=1` maintains an exponential moving average.",
    )
    token_budget: int = setting(
        16_384,
        min=1,
        help="Maximum number of tokens, including padding, in one forward pass; a step runs as many passes as it "
        "needs.",
    )
    layout: Literal["auto", "padded", "packed", "prefix_shared"] = setting(
        "auto",
        help="How trajectories share a forward pass. `padded`: rows of similar length are padded to the length of the "
        "longest row. `packed`: rows are packed end to end without padding. `prefix_shared`: rows are packed, and the "
        "prompt of each group is processed once. `auto` uses `prefix_shared` if it requires less computation and the "
        "model supports it, otherwise `padded`.",
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto",
        help="Whether torch.compile fuses the elementwise kernels of norms and MLPs in a training step. Compilation "
        "changes the results only by rounding errors. Sampling is never compiled. `auto` compiles on CUDA unless a "
        "compiled module fails a comparison with the uncompiled module.",
    )
    stop_at_reward: float | None = setting(
        None,
        help="Stop the run when the mean task reward of `stop_window` consecutive rollouts reaches this value.",
    )
    stop_window: int = setting(
        3, min=1, help=("Number of consecutive rollouts whose mean reward must reach `stop_at_reward`.")
    )
    checkpoint_every: int = setting(10, min=1, help="Number of optimizer steps between two checkpoints.")
    keep_checkpoints: int = setting(2, min=1, help="Number of checkpoints to keep; older checkpoints are removed.")
    peak_flops: float | None = setting(
        None,
        above=0,
        help="The device's peak floating-point operations per second, for the metric `mfu`. None uses the data-sheet "
        "value of a recognised GPU. If there is no such value, as on a CPU, the metric is omitted.",
    )
    metrics: tuple[Callable[..., Any], ...] = setting(
        (),
        help="Functions (`MetricFunction` in `rlhf_pipeline.learner.metrics`) that add custom metrics to each step; "
        "on the command line, specify `FILE.py:NAME`.",
    )
    keep_token_figures: bool = setting(
        False,
        help="Store the policy's log-prob and entropy for each token that a step uses, so that `view` can show the "
        "token's probability ratio and entropy. A later step that uses the token replaces the values. Requires an "
        "additional forward pass per step and 8 bytes per token.",
    )
    logger: Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"] | None = setting(
        None,
        help="Also send the metrics of each step to this TorchRL logger, which writes to the run folder.",
    )
    logger_project: str | None = setting(None, help="The project in W&B or Trackio; None uses the default.")
    logger_name: str | None = setting(
        None, help="The name of the run in the logger; None uses the name of the run folder."
    )
    logger_tags: tuple[str, ...] = setting((), help="The tags of the run in W&B.")
    logger_samples: int = setting(
        0,
        min=0,
        help="Number of trajectories per step in a W&B table of prompts, completions, rewards and advantages.",
    )

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps on each rollout before the next one is collected."""
        return self.epochs * self.minibatches

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step number `step` (1-based): a linear warm-up, then the schedule.

        The step after the warm-up has the full rate. A falling rate reaches `min_lr` at `lr_decay_steps`, by default
        the step after the last.

        >>> learn = Learn(lr=1.0, steps=6, warmup_steps=2, lr_schedule="linear")
        >>> [learn.learning_rate(step) for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        warm = self.num_warmup_steps
        if step <= warm:
            return self.lr * (step / warm)
        if self.lr_schedule == "constant":
            return self.lr
        first, end = warm + 1, self.lr_decay_steps or self.steps + 1
        done = min((step - first) / (end - first), 1.0) if end > first else 1.0
        left = 1.0 - done if self.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.lr - self.min_lr) * left

    @property
    def num_warmup_steps(self) -> int:
        """Number of optimizer steps of the warm-up, from `warmup_steps` or `warmup_ratio`."""
        last = self.steps if self.lr_decay_steps is None else self.lr_decay_steps - 1
        return self.warmup_steps or math.ceil(self.warmup_ratio * last)

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.lr_schedule == "constant" or (self.lr_decay_steps or self.steps + 1) > self.warmup_steps,
                f"lr_schedule={self.lr_schedule} ends at step {self.lr_decay_steps or self.steps + 1}, within the "
                f"warm-up of {self.warmup_steps} steps. Set lr_decay_steps to a larger value.",
            ),
            (
                not (self.warmup_steps and self.warmup_ratio),
                f"warmup_steps is {self.warmup_steps} and warmup_ratio is {self.warmup_ratio}, but only one may be "
                "set. Set the other to 0.",
            ),
            (
                self.min_lr <= self.lr,
                f"min_lr is {self.min_lr}; it must be at most lr, {self.lr}.",
            ),
            (
                self.logger_project is None or self.logger in ("wandb", "trackio"),
                f"logger_project needs logger=wandb or logger=trackio, but the logger is {self.logger}.",
            ),
            (
                self.logger == "wandb" or not (self.logger_tags or self.logger_samples),
                f"logger_tags and logger_samples need logger=wandb, but the logger is {self.logger}.",
            ),
            (
                self.logger_name is None or self.logger is not None,
                "logger_name needs a logger, for example logger=wandb.",
            ),
            (
                not (self.offload_optimizer and self.optimizer == "adamw_8bit"),
                "offload_optimizer and optimizer=adamw_8bit cannot be combined; choose one.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline(Settings):
    """A complete training run: policy, prompts, reward, write path, buffer, loss and loop."""

    name: str = setting(help="The name of the definition in messages and lists.")
    policy: TinyPolicy | PretrainedPolicy = setting(help="The model: created untrained, or loaded from a checkpoint.")
    prompts: PromptSource = setting(factory=NoPrompts, help="The source of prompts; not needed with `replay`.")
    reward: RewardFunction | Reward | tuple[RewardFunction | Reward, ...] = setting(
        no_reward,
        help="A function `(prompt, completion, answer, meta) -> float`, a function with other arguments, or several "
        "functions. Pass each function directly or as `Reward(function, weight=, name=)`; see docs/rewards.md. If a "
        "call raises an exception, the trajectory is stored without a reward, and the run continues. Not needed with "
        "`replay`.",
    )
    environment: Callable[..., Any] | dict[str, Any] | None = setting(
        None,
        help="The environment that replies to the policy's turns: a class with the methods `reset` and `step`, "
        "`Tools(...)`, an environment from another library, or a dict of environments. For a dict, the `environment` "
        "column of the prompts selects the environment. See docs/environments.md. With None, a trajectory has one "
        "turn.",
    )
    description: str = setting("", help="A one-line description, shown by `rlhf-pipeline list`.")
    needs: str = setting("nothing", help="The prerequisites of a run, as one phrase, shown by `rlhf-pipeline list`.")
    collect: Collect = setting(factory=Collect, help="How completions are sampled.")
    write: WritePath = setting(factory=WritePath, help="How a trajectory is processed before it is stored.")
    buffer: Buffer = setting(factory=Buffer, help="The store of trajectories.")
    sample: Sample = setting(factory=Sample, help="The trajectories that an optimizer step uses.")
    loss: GRPO = setting(factory=GRPO, help="The policy loss, and its KL and entropy terms.")
    learn: Learn = setting(factory=Learn, help="The optimizer and the training loop.")
    replay: Replay | None = setting(
        None, help="Learn from stores without sampling. With None, the run samples completions."
    )
    evaluate: Evaluate | dict[str, Evaluate] | None = setting(
        None,
        help="Evaluate the policy regularly on held-out prompts. A dict specifies several named evaluations, for "
        'example `{"gsm8k": Evaluate(...)}`; see docs/evaluation.md. None disables evaluation.',
    )

    def __post_init__(self) -> None:
        for code in self._code():
            identity_of(code)  # here, because a call may change what its function holds
        if self.reward is None:
            object.__setattr__(self, "reward", no_reward)
        if self.environment is not None:
            if self.reward is no_reward:
                object.__setattr__(self, "reward", environment_reward)
            if self.replay is None and isinstance(self.prompts, NoPrompts):
                object.__setattr__(self, "prompts", EmptyPrompts())
            if isinstance(self.prompts, EmptyPrompts):
                object.__setattr__(self, "evaluate", _asking_nothing(self.evaluate))
        Settings.__post_init__(self)

    def _code(self) -> Iterator[Any]:
        """Yield the functions and classes that are called during a run."""
        reward: Any = self.reward
        rewards: list[Any] = [*reward] if isinstance(reward, (list, tuple)) else [reward]
        functions: list[Any] = [each.function if isinstance(each, Reward) else each for each in rewards]
        groups = ((self.write, "estimator"), (self.loss, "objective"), (self.sample, "strategy"))
        functions += [getattr(group, name, None) for group, name in groups]
        yield from filter(callable, [*functions, *code_of(self.environment)])

    @property
    def curriculum(self) -> Curriculum | None:
        """The curriculum of the prompts, if there is one."""
        return self.prompts.curriculum if self.replay is None and isinstance(self.prompts, Mix) else None

    @property
    def evaluations(self) -> dict[str, Evaluate]:
        """The evaluations by the name of their set; a single evaluation has an empty name."""
        return evaluation_sets(self.evaluate)

    @property
    def environment_rewards(self) -> tuple[str, ...]:
        """The known names of the environment's rewards: those that it declares, and those that `reward` lists."""
        if self.environment is None:
            return ()
        selected = [reward.function for reward in rewards_of(self.reward)]
        declared = [function.name for function in selected if isinstance(function, EnvironmentReward)]
        return tuple(dict.fromkeys([*(rewards_of_environment(maker_of(self.environment)) or ()), *declared]))

    @property
    def reward_weights(self) -> dict[str, float]:
        """The rewards with a column `reward_NAME`, and their weights; see `data.rewards.reward_weights`."""
        return reward_weights(self.reward, self.environment_rewards)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The names of all rewards that are known before sampling; results may have further components."""
        labels = [reward.label for reward in rewards_of(self.reward)] if has_columns(self.reward) else []
        return tuple(dict.fromkeys([*labels, *self.reward_weights]))

    @property
    def step_size(self) -> int:
        """The number of trajectories of a step if `sample.batch_size` is not set."""
        return self.collect.rollout_size // self.learn.minibatches

    @property
    def max_staleness(self) -> int:
        """The largest age at which a trajectory is learned from: the last step on its rollout is never too late."""
        return max(self.buffer.max_staleness, self.learn.steps_per_rollout - 1)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term, in the reward or in the loss, needs reference log-probs."""
        return self.write.kl_coef > 0 or self.loss.reads_reference

    @property
    def longest_completion(self) -> int:
        """The maximum number of tokens that the policy samples in a trajectory."""
        return self.collect.max_new_tokens * (1 if self.environment is None else self.collect.max_turns)

    def _named_figures(self) -> Iterator[tuple[bool, str]]:
        """Yield whether each figure that controls the run can exist: later results may have further components."""
        functions = [reward.function for reward in rewards_of(self.reward)]
        if any(may_have_parts(function) and function is not environment_reward for function in functions):
            return
        if environment_reward in functions and not self.environment_rewards:
            return
        figures = {"collect.dynamic_by": self.collect.dynamic_by}
        figures |= {} if self.curriculum is None else {"prompts.curriculum.by": self.curriculum.by}
        for name, evaluation in self.evaluations.items():
            is_built_in = evaluation.best in EVALUATION_FIGURES or passes_of(evaluation.best) is not None
            figures |= {f"evaluate.{name}.best".replace("..", "."): None if is_built_in else evaluation.best}
            figures |= {f"evaluate.{name}.success".replace("..", "."): evaluation.success}
        for field, figure in figures.items():
            reward_list = ", ".join(self.reward_names) or (
                "none, because there is only one function. Name it: Reward(f, name=...)"
            )
            yield (
                figure is None or figure in self.reward_names,
                f"{field} is {figure!r}, but the rewards are: {reward_list}.",
            )

    def _rules(self) -> list[tuple[bool, str]]:
        selected = [reward.function for reward in rewards_of(self.reward)]
        of_environment = [reward.name for reward in selected if isinstance(reward, EnvironmentReward)]
        maker = None if self.environment is None else maker_of(self.environment)
        declared = None if maker is None or not of_environment else rewards_of_environment(maker)
        undeclared = [] if declared is None else [name for name in of_environment if name not in declared]
        epochs, parts = self.learn.epochs, self.learn.minibatches
        rollout, room = self.collect.rollout_size, self.buffer.max_trajectories
        return [
            (
                self.replay is not None or not isinstance(self.prompts, NoPrompts),
                "no prompts. Set prompts, for example prompts=CopyDigits(), or replay=Replay() to learn from stores.",
            ),
            (
                not any(isinstance(evaluation.prompts, NoPrompts) for evaluation in self.evaluations.values()),
                "evaluate has no prompts. Set evaluate.prompts to prompts that the run does not learn from.",
            ),
            (
                self.replay is not None or self.reward is not no_reward,
                "no reward. Set reward to a function (prompt, completion, answer, meta) -> float, or set environment.",
            ),
            (
                self.environment is not None or not of_environment,
                f"Reward({of_environment[0] if of_environment else ''!r}) is an environment's reward, but there is "
                "no environment.",
            ),
            (
                not undeclared,
                f"Reward({undeclared[0] if undeclared else ''!r}) is not among the rewards that the environment "
                f"declares: {', '.join(declared or ())}.",
            ),
            (
                maker is None or not self.collect.retries or not has_effects(maker),
                f"collect.retries is {self.collect.retries}, but the environment has external effects, which a "
                "retry would repeat. Set collect.retries=0.",
            ),
            *self._named_figures(),
            *(
                (
                    not name or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_]*", name) is not None,
                    f"the name {name!r} in evaluate is not a valid folder name: use letters, digits and underscores.",
                )
                for name in self.evaluations
            ),
            (
                sum(evaluation.best is not None and evaluation.keep_best for evaluation in self.evaluations.values())
                <= 1,
                "several evaluations specify `best`, but only one may select the best checkpoint.",
            ),
            (
                self.evaluate is None or len(self.evaluations) > 0,
                "evaluate is an empty dict. Add an evaluation, or remove evaluate.",
            ),
            (
                self.environment is None or not self.collect.prefill,
                f"collect.prefill is {self.collect.prefill!r}, but the conversations of an environment have several "
                "turns. Instead, end the generation prompt of policy.chat_template with this text.",
            ),
            (
                self.evaluate is None or self.reward is not no_reward,
                "evaluate needs a reward function, even with replay.",
            ),
            (
                self.curriculum is None or (room is None and self.collect.dynamic == 1 and not self.write.drops_groups),
                "a curriculum uses the success rate of every group, but buffer.max_trajectories, collect.dynamic "
                "and write.zero_variance=drop each remove groups from the store. Remove these settings, or "
                "prompts.curriculum.",
            ),
            (
                room is None or room >= rollout,
                f"buffer.max_trajectories is {room}, but one rollout has {rollout} trajectories. Set it to at least "
                f"{rollout}.",
            ),
            (
                not (self.learn.reference_every and self.policy.lora_rank),
                "learn.reference_every updates a reference model, but with policy.lora_rank there is none: the "
                "reference is the model with its adapters disabled. Set learn.reference_every=0 or policy.lora_rank=0.",
            ),
            (
                self.collect.engine == "slots" or not self.policy.lora_rank,
                f"collect.engine={self.collect.engine} loads complete models, not adapters. Set policy.lora_rank=0, "
                "or collect.engine=slots.",
            ),
            (
                self.replay is not None or self.collect.group_size > 1 or self.write.estimator == "reinforce_pp",
                f"collect.group_size is 1, but write.estimator={self.write.estimator} compares the members of a "
                "group, so every advantage would be 0. Set collect.group_size to 2 or more, or "
                "write.estimator=reinforce_pp.",
            ),
            (
                (self.write.min_group_size or 1) <= self.collect.group_size,
                f"write.min_group_size is {self.write.min_group_size}, but a group has {self.collect.group_size} "
                f"members (collect.group_size). Set it to at most {self.collect.group_size}.",
            ),
            (
                self.replay is not None or self.sample.strategy != "fresh" or self.sample.batch_size is None,
                "sample.strategy=fresh uses the complete newest rollout, or divides it into learn.minibatches parts, "
                "so sample.batch_size cannot be set.",
            ),
            (
                parts == 1 or self.sample.strategy == "fresh",
                f"learn.minibatches is {parts}, which divides the newest rollout, but "
                f"sample.strategy={self.sample.strategy} draws its batches independently. Set sample.batch_size "
                "to the size of a batch, and learn.epochs to the number of batches.",
            ),
            (
                parts <= rollout,
                f"learn.minibatches is {parts}, but a rollout has {rollout} trajectories. Set it to at most {rollout}.",
            ),
            (
                self.replay is not None
                or self.sample.strategy != "fresh"
                or (self.sample.max_uses or epochs) >= epochs,
                f"learn.epochs is {epochs}, and each epoch uses the complete newest rollout, but sample.max_uses is "
                f"{self.sample.max_uses}. Set sample.max_uses to at least {epochs}.",
            ),
            (
                self.sample.strategy != "anchored" or epochs > 1,
                "sample.strategy=anchored uses a complete rollout and then replays until the next one, but "
                f"learn.epochs is {epochs}. Set it to 2 or more.",
            ),
            (
                self.sample.strategy != "anchored" or self.replay is None or self.replay.recorded_order,
                "sample.strategy=anchored replays between rollouts, but a store has no rollout order. Draw "
                "uniformly with --set sample.strategy=uniform, or use --set replay.recorded_order=true to repeat "
                "the order of the run that filled the store.",
            ),
        ]
