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
"""The figures of an evaluation that more of is better, beside pass@k and those of named rewards."""


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

    alphabet: str = setting("0123456789=", help="Every character that may occur.")
    hidden_size: int = setting(64, min=1, help="Width of the model; a multiple of `num_heads`.")
    num_layers: int = setting(2, min=1, help="Layers of the model.")
    num_heads: int = setting(4, min=1, help="Attention heads of each layer.")
    chat_template: str | None = setting(
        None, help="The tokenizer's chat template: a Jinja file, or its text; an environment with tools needs one."
    )
    response_template: dict[str, Any] | None = setting(
        None, help="How its tool calls are read: the `response_template` of transformers' tokenizers."
    )
    lora_rank: int = setting(
        0,
        min=0,
        help="Rank of LoRA adapters; 0 trains every weight. See `PretrainedPolicy.lora_rank`.",
    )
    lora_alpha: float = setting(32.0, above=0, help="The adapters' output is scaled by `lora_alpha / lora_rank`.")
    lora_targets: str = setting(
        "all-linear",
        help="The modules that get an adapter; see `PretrainedPolicy.lora_targets`.",
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
    """A causal language model from a checkpoint folder, a GGUF file, or the Hugging Face hub by name."""

    path: str = setting(
        help="A folder written by `save_pretrained`, a GGUF file, or a hub name. Only a hub name uses the network.",
    )
    chat_template: str | None = setting(
        None, help="A chat template in place of the tokenizer's: a Jinja file, or its text."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        help="The model's compute dtype. `auto` is bfloat16 on CUDA and float32 elsewhere. With bfloat16 the "
        "optimizer keeps float32 master weights.",
    )
    lora_rank: int = setting(
        0,
        min=0,
        help="Rank of LoRA adapters, which are then the only trained weights; 0 trains every weight. Needs peft. "
        "The model with its adapters switched off is the reference, so no second model is needed.",
    )
    lora_alpha: float = setting(32.0, above=0, help="The adapters' output is scaled by `lora_alpha / lora_rank`.")
    lora_targets: str = setting(
        "all-linear",
        help="The modules that get an adapter: `all-linear` (all but the head), or comma-separated names, for "
        "example `q_proj,v_proj`.",
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

    prompts_per_rollout: int = setting(16, min=1, help="Prompts in one rollout; each gets a complete group.")
    group_size: int = setting(16, min=1, help="Completions per prompt.")
    dynamic: int = setting(
        1,
        min=1,
        help="Dynamic sampling (DAPO, arXiv:2503.14476): the maximum number of rounds of `prompts_per_rollout` "
        "prompts for one rollout, which keeps the first groups whose rewards are not all equal. If there are "
        "too few after the last round, groups without spread fill it. 1 keeps every group.",
    )
    dynamic_by: str | None = setting(
        None,
        help="The name of the reward or component that must differ within a group for `dynamic` to keep the group; "
        "None is the total reward.",
    )
    max_new_tokens: int = setting(
        64,
        min=1,
        help="Maximum number of tokens of a completion; a longer completion is truncated and ends with `length`. "
        "With an environment, the limit of one turn.",
    )
    max_turns: int = setting(8, min=1, help="With an environment: maximum number of turns of a conversation.")
    max_row_tokens: int | None = setting(
        None,
        min=2,
        help=(
            "With an environment: maximum number of tokens of prompt, turns and replies together; None is the "
            "model's context."
        ),
    )
    step_timeout_s: float | None = setting(
        60.0,
        above=0,
        help="With an environment: seconds after which a call fails (`timeout`); None waits without a limit.",
    )
    reply_after: int = setting(
        32,
        min=0,
        help="For an environment with `async def step` or `parallel = True`: token steps between the end of a turn "
        "and the step that takes its reply. Calls run in the meantime, and sampling waits only for a reply "
        "that is due, so the rows that share a batch depend only on the data.",
    )
    call_threads: int = setting(
        256,
        min=1,
        help=("Maximum number of threads for rewards, environments and tools; a conversation keeps one thread."),
    )
    live_conversations: int | None = setting(
        None,
        min=1,
        help="With an environment: maximum number of conversations, and therefore of environments, that exist at "
        "once. The conversations of a rollout run in parts of this size. None starts all of them at once.",
    )
    history: Literal["sampled", "rewritten"] = setting(
        "sampled",
        help="With an environment and a chat template that rewrites earlier turns, for example drops their "
        "thinking: `sampled` continues the row, so the policy reads the tokens that it sampled; `rewritten` "
        "gives the policy the output of the template, and begins a new row of the episode if that differs from "
        "the row (docs/environments.md).",
    )
    max_reply_tokens: int | None = setting(
        None,
        min=1,
        help="With an environment: maximum number of tokens in the text of a reply; a longer reply is truncated, "
        "with the mark ` [cut]`. With None, a reply that does not fit into the row ends the conversation.",
    )
    max_call_errors: int | None = setting(
        4,
        min=1,
        help="With tools: maximum number of failed calls (malformed, unknown, wrong arguments) in a conversation. "
        "The policy sees each error; the last one ends the conversation (`calls`). With None, only `max_turns` "
        "limits them.",
    )
    retries: int = setting(
        0,
        min=0,
        help="Maximum number of retries of a failed reward call, and of a conversation that an infrastructure "
        "failure ended (a timeout, an error of a tool, an abort by the engine); the failures are stored with "
        "it. Not with `has_effects`.",
    )
    alarm_failed: float = setting(
        0.1,
        min=0,
        max=1,
        help="A rollout with a larger share of trajectories without a trusted reward is reported.",
    )
    temperature: float = setting(
        1.0,
        above=0,
        help="Sampling temperature. The behaviour log-probs are at this temperature.",
    )
    top_k: int = setting(
        0,
        min=0,
        help="Draw from the `top_k` most probable tokens; 0 for all. This, `top_p` and `min_p` need `engine=slots`; "
        "the store then has, per token, the probability mass of the tokens that could be drawn "
        "(`support_log_mass`).",
    )
    top_p: float = setting(
        1.0,
        above=0,
        max=1,
        help=("Draw from the smallest set of most probable tokens with at least this total probability; 1 for all."),
    )
    min_p: float = setting(
        0.0, min=0, max=1, help="Draw from the tokens with at least this share of the largest probability; 0 for all."
    )
    stop: tuple[str, ...] = setting(
        (), help="Strings that end a completion, at the token that completes one of them; with any engine."
    )
    keep_stop: bool = setting(
        True, help="Whether the text that the reward sees ends with the stop string; the tokens always do."
    )
    prefill: str = setting(
        "",
        help="Text at the beginning of every completion, for example `<think>`, also in evaluations: the policy "
        "continues it, rewards see it, and it is not trained on. Not with an environment.",
    )
    num_slots: int = setting(64, min=1, help="Number of completions generated in parallel.")
    engine: str = setting(
        "slots",
        help="The engine that samples: `slots`, built in, in the process; `vllm`, also in the process (needs the "
        "extra `vllm`); or the address of a vLLM server, `http://HOST:PORT`. See docs/engines.md for how to "
        "start each engine and how reproducible its runs are.",
    )
    engine_memory: float = setting(
        0.5,
        above=0,
        below=1,
        help="For `engine=vllm`: the share of a GPU's memory for its weights and cache; the learner has the rest.",
    )
    refresh_weights_every: int = setting(
        0,
        min=0,
        help="For a collector beside a learner: number of sampled tokens per slot between two checks for newer "
        "weights, with which unfinished completions continue; 0 loads weights only between rollouts. Each "
        "log-prob is computed with the weights that sampled its token; the caches of the prompt and of earlier "
        "tokens are recomputed with the new weights, and the store records which weights sampled which tokens. "
        "With a server, the check is made twice a second instead.",
    )

    reward_concurrency: int = setting(
        16,
        min=1,
        help="Maximum number of concurrent reward calls during sampling; 1 for functions that are not re-entrant.",
    )
    reward_timeout_s: float | None = setting(
        300.0,
        above=0,
        help="Seconds after which a reward call fails (`timeout`); None waits without a limit.",
    )
    skip_special_tokens: bool = setting(
        False,
        help="Remove special tokens such as `<think>` from the text that rewards see and that is stored. The token "
        "that ends a completion is never in the text.",
    )

    @property
    def rollout_size(self) -> int:
        """Trajectories in one rollout."""
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
                f"top_k, top_p and min_p need engine=slots, and engine is {self.engine}: vLLM does not report the "
                "probability mass of the truncated support, without which ratios would be wrong.",
            ),
            (all(self.stop), "a stop string is empty."),
            (
                self.dynamic > 1 or self.dynamic_by is None,
                f"dynamic_by is {self.dynamic_by!r}, but dynamic is 1, which keeps every group. Set dynamic, the "
                "maximum number of rounds of a rollout.",
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
        "min_group_size and group_timeout_s must be set together: the number of members that suffice, and the time "
        "after which they do.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePath(Settings):
    """The processing of a completed trajectory before it is stored."""

    estimator: Estimator | Callable[..., Any] = setting(
        "grpo",
        help="How the returns of a group are converted to advantages; the formulas are in "
        "`rlhf_pipeline.functional.advantage`. `reinforce_pp`, `reinforce_pp_baseline` and `grpo_batch` (TRL's "
        "`scale_rewards=batch`) divide by the spread of the whole rollout, or of all gathered trajectories "
        "with `replay`. `turn_grpo` gives each turn of a conversation a separate advantage, from the rewards "
        "of that turn and later turns. `gdpo` normalises each named reward in its group, then the weighted sum "
        "over the rollout. Or a custom function, `EstimatorFunction` there; on a command line `FILE.py:NAME`.",
    )
    turn_discount: float = setting(
        1.0, min=0, max=1, help="With `turn_grpo`: weight of the next turn's advantage in the advantage of a turn."
    )
    episode_return: Literal["sum", "verl", "skyrl"] = setting(
        "sum",
        help="The return by which an episode of several rows is ranked; all rows get its advantage. `sum`: the "
        "rewards of all rows, minus the penalty of each token. `verl`: the rewards of the last row, minus the "
        "penalty of its tokens. `skyrl`: the reward of the last turn, minus the penalty of its tokens. With "
        "one row and one turn all are the same.",
    )
    kl_coef: float = setting(0.0, min=0, help="Weight of the k1 penalty in the reward. 0 needs no reference model.")
    kl_target: float | None = setting(
        None,
        above=0,
        help="Target of an adaptive controller: the mean KL per trajectory (nats); None keeps `kl_coef` constant.",
    )
    kl_horizon: int = setting(10_000, min=1, help="Trajectories over which the adaptive controller acts.")
    zero_variance: Literal["keep", "drop", "mark"] = setting(
        "keep",
        help="What to do with a group whose returns are all equal (with a KL penalty: equal up to rounding).",
    )
    min_group_size: int | None = setting(
        None,
        min=1,
        help="Minimum number of members for closing a group after `group_timeout_s`; None waits for all.",
    )
    group_timeout_s: float | None = setting(
        None,
        min=0,
        help="Seconds from a group's first member until it may close early; None for never. Needs `min_group_size`.",
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
                "kl_target needs a kl_coef above 0 to start from.",
            ),
            (
                self.estimator != "turn_grpo" or self.kl_coef == 0,
                f"kl_coef is {self.kl_coef}, a penalty in the reward of a complete trajectory, but "
                "estimator=turn_grpo compares turns. Set write.kl_coef=0 and loss.kl_to_ref_coeff.",
            ),
            (
                self.estimator != "gdpo" or self.kl_coef == 0,
                f"kl_coef is {self.kl_coef}, a penalty in the sum of the rewards, but estimator=gdpo needs the "
                "named rewards. Set write.kl_coef=0 and loss.kl_to_ref_coeff.",
            ),
            close_policy_rule(self.min_group_size, self.group_timeout_s),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer(Settings):
    """The store of trajectories, and which of them the learner may use."""

    backend: Literal["memmap", "zarr"] = setting(
        "memmap",
        help="The store's format on disk: `memmap` is raw, for training; `zarr` is compressed objects.",
    )
    durability: Literal["process", "power", "group"] = setting(
        "process",
        help="What an acknowledged trajectory survives: `process` kill -9; `power` and `group` also a power loss.",
    )
    max_trajectories: int | None = setting(
        None,
        min=1,
        help="Maximum number of trajectories; the oldest are evicted first. None keeps all.",
    )
    max_bytes: int | None = setting(
        None,
        min=1,
        help="Maximum size of the run folder on disk, in bytes. The run warns a day ahead, at its current rate, and "
        "saves a checkpoint and stops before one more step and its checkpoint would exceed the limit. None: "
        "all free space.",
    )
    max_staleness: int = setting(
        0,
        min=0,
        help="Maximum age of a sampled trajectory, in optimizer steps since the oldest weights that produced it; "
        "the steps on the newest rollout are always within it.",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(Settings):
    """Which stored trajectories an optimizer step learns from, among those that `Buffer.max_staleness` allows.

    The choice is a function of the stored trajectories, the seed and the step, and the ledger records it.
    """

    strategy: Strategy | Callable[..., Any] = setting(
        "fresh",
        help="`fresh`: all trajectories within the age limit, which in a run is the newest rollout; with `replay`, "
        "every trajectory once per epoch, groups together, in a new order each time, `batch_size` in a step. "
        "The other strategies draw `batch_size` trajectories: `uniform` with equal probability; `recency` by "
        "age; `priority` by the size of the advantage and by age; `group` complete groups; `success` complete "
        "groups with a medium success rate; `variance` complete groups whose rewards vary; `mix` a part from "
        "the newest rollout and the rest by age; `anchored` the complete newest rollout in its first step, and "
        "a batch by age in the other steps of `learn.epochs`. See `rlhf_pipeline.buffer.samplers`. Or a custom "
        "function, `StrategyFunction` there; on a command line `FILE.py:NAME`.",
    )
    batch_size: int | None = setting(
        None,
        min=1,
        help="Trajectories per step; None takes the number of trajectories in a rollout. For `fresh`, only with "
        "`replay`; see `learn.minibatches`.",
    )
    tau: float | None = setting(
        None,
        above=0,
        help="Age in optimizer steps at which a trajectory's probability has fallen to 1/e; None ignores the age.",
    )
    alpha: float = setting(1.0, min=0, help="Exponent of the advantage (`priority`) or of the variance (`variance`).")
    fresh_fraction: float = setting(
        0.5,
        min=0,
        max=1,
        help="For `mix`: the share of a batch that comes from the newest rollout.",
    )
    max_uses: int | None = setting(
        None, min=1, help=("Maximum number of steps that use a trajectory; None sets no limit.")
    )
    min_ess: float | None = setting(
        None,
        above=0,
        max=1,
        help="Trajectories of the same age get less weight if their effective sample size, as a share of their "
        "tokens, is below this; see `rlhf_pipeline.learner.ess_guard`. Needs an additional forward pass for a "
        "stale batch. None weights all equally.",
    )
    skip_below_ess: float = setting(
        0.1,
        min=0,
        max=1,
        help="Trajectories of the same age are excluded below this share; needs `min_ess`.",
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

    The chosen trajectories are first copied into the run's own store, through the write path if reference or behaviour
    log-probs or advantages are missing, so the stores themselves are never changed.
    """

    stores: tuple[str, ...] = setting(
        (),
        help="Stores, or run folders, to learn from; `rlhf-pipeline replay STORE...` sets this.",
    )
    weights: tuple[float, ...] = setting(
        (),
        above=0,
        help="The share of each store in a batch; without weights, all stores are treated as one.",
    )
    filters: tuple[str, ...] = setting(
        (),
        help="Conditions that a trajectory must meet: `reward>=0.5`, `version<100`, `num_tokens<=512`, "
        "`date>=2026-01-31`.",
    )
    epochs: float | None = setting(
        None,
        above=0,
        help="Stop when the steps have used `epochs` times the number of gathered trajectories; with None, only "
        "`learn.steps` limits the run.",
    )
    skip_damaged: bool = setting(
        False,
        help="Skip and count trajectories that do not match their checksums; otherwise the replay is rejected.",
    )
    recorded_order: bool = setting(
        False,
        help="Step k learns from the trajectories that the run which filled the store used at step k, by policy "
        "version. Needs exactly one store.",
    )

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                not self.weights or not self.stores or len(self.weights) == len(self.stores),
                f"{len(self.weights)} weights for {len(self.stores)} stores. Give one weight per store, or none.",
            ),
            (
                not self.recorded_order or (len(self.stores) <= 1 and self.epochs is None),
                "recorded_order needs exactly one store and no epochs.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate(Settings):
    """Evaluation with the reward of the definition on prompts that are never trained on."""

    prompts: PromptSource = setting(factory=NoPrompts, help="The source of the evaluation prompts.")
    every: int = setting(10, min=1, help="Optimizer steps between two evaluations.")
    num_prompts: int = setting(
        64,
        min=1,
        help=("Number of prompts: the first prompts of the source in a fixed order, or all if there are fewer."),
    )
    group_size: int = setting(1, min=1, help="Completions per prompt; pass@k needs at least k completions.")
    temperature: float = setting(1.0, min=0, help=("Sampling temperature; 0 selects the most probable token."))
    top_k: int | None = setting(
        None, min=0, help="Draw from the `top_k` most probable tokens; 0 for all, None uses `collect.top_k`."
    )
    top_p: float | None = setting(
        None,
        above=0,
        max=1,
        help=(
            "Draw from the smallest set of most probable tokens with at least this total probability; None uses "
            "`collect.top_p`."
        ),
    )
    min_p: float | None = setting(
        None,
        min=0,
        max=1,
        help="Draw from the tokens with at least this share of the largest probability; None uses `collect.min_p`.",
    )
    max_new_tokens: int | None = setting(
        None, min=1, help="Maximum number of tokens of a completion; None uses `collect.max_new_tokens`."
    )
    success: str | None = setting(
        None,
        help=(
            "The name of the reward or component that determines whether a completion is right; None uses the total "
            "reward."
        ),
    )
    success_at: float = setting(
        1.0, help="The minimum value of `success` for a completion that counts as right in pass@k."
    )
    best: str | None = setting(
        None,
        help="The figure that selects the best weights: `reward`, `pass@K` for any K up to `group_size`, or the "
        "name of a reward or component. None is `reward`, the mean. With several sets, the set with `best` "
        "decides, otherwise the first set.",
    )
    at_start: bool = setting(True, help="Whether to evaluate the initial weights of the run.")
    keep_best: bool = setting(
        True,
        help="Save a checkpoint of the best evaluated weights and keep it in addition to the newest checkpoints. "
        "The best weights have the highest figure `best`; if several are equal, the earliest.",
    )

    def sampling(self, collect: Collect) -> Collect:
        """Return how its completions are sampled: as for learning, unless it specifies otherwise."""
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
                f"best is {self.best!r}, but a group has {self.group_size} completions: pass@k needs 1 to "
                f"{self.group_size} of them. Set group_size={k}, or best='pass@{self.group_size}'.",
            ),
        ]


def _asking_nothing(evaluate: Any) -> Any:
    """Return evaluations that ask nothing where they have no prompts, for an environment that does all the asking."""
    if isinstance(evaluate, Mapping):
        return {name: _asking_nothing(part) for name, part in cast("Mapping[str, Any]", evaluate).items()}
    if isinstance(evaluate, Evaluate) and isinstance(evaluate.prompts, NoPrompts):
        return replace(evaluate, prompts=EmptyPrompts())
    return evaluate


def evaluation_sets(evaluate: Evaluate | Mapping[str, Evaluate] | None) -> dict[str, Evaluate]:
    """Return the evaluations of a definition by the name of their set; of a single one the name is empty."""
    if evaluate is None:
        return {}
    return {"": evaluate} if isinstance(evaluate, Evaluate) else dict(evaluate)


def deciding_set(sets: Mapping[str, Evaluate]) -> str | None:
    """Return the name of the set that decides which weights are the best: the one that sets `best`, else the first."""
    keeping = [name for name, settings in sets.items() if settings.keep_best]
    return next((name for name in keeping if sets[name].best is not None), keeping[0] if keeping else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class DPPO(Settings):
    """The trust region of `objective=dppo` around the sampler's probability of each token.

    Source: arXiv:2602.04879, equations 11 to 14; `functional.policy_loss.dppo_loss` has the formula.
    """

    divergence: Literal["tv", "kl"] = setting(
        "tv",
        help="The divergence of policy and sampler over the two outcomes {sampled token, any other token}: total "
        "variation, or the KL divergence from the sampler to the policy.",
    )
    low: float | None = setting(
        None,
        above=0,
        help="Maximum divergence of a token that has become less likely since sampling. None is 0.2 for `tv` and "
        "0.05 for `kl`.",
    )
    high: float | None = setting(
        None, above=0, help="The same for a token that has become more likely. None has the same meaning as for `low`."
    )
    mask: Literal["harmful", "both"] = setting(
        "harmful",
        help="Outside the region, a token has no policy loss if its gradient would increase the divergence "
        "(`harmful`, as in the paper), or regardless of the sign of its advantage (`both`).",
    )
    ratio_cap: float | None = setting(
        20.0,
        min=1,
        help="Upper bound of the ratio of policy to sampler, which weights a token's gradient; 20 in verl. None, as "
        "in the paper, sets no bound.",
    )

    @property
    def bounds(self) -> tuple[float, float]:
        """The largest divergence below and above the sampler's probability."""
        usual = 0.2 if self.divergence == "tv" else 0.05
        return usual if self.low is None else self.low, usual if self.high is None else self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class VESPO(Settings):
    """The weight of `objective=vespo`: `exp(scale + power log w - scale w)` of a completion's importance weight `w`.

    Source: arXiv:2602.10693; the defaults are TRL's. `functional.policy_loss.vespo_loss` has the formula.
    """

    power_positive: float = setting(2.0, min=0, help="The power of `w` where the advantage is at least 0.")
    scale_positive: float = setting(
        3.0, above=0, help="How fast the weight falls for large `w` where the advantage is at least 0."
    )
    power_negative: float = setting(3.0, min=0, help="The power of `w` where the advantage is below 0.")
    scale_negative: float = setting(
        2.0, above=0, help="How fast the weight falls for large `w` where the advantage is below 0."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(Settings):
    """The loss."""

    objective: Objective | Callable[..., Any] = setting(
        "grpo",
        help="PPO's clip on token ratios, CISPO's clipped weight, PPO's clip on sequence ratios (clip at about "
        "3e-4), SAPO's smooth gate without a clip, the geometric mean of clipped ratios (GMPO, with "
        "`aggregation=sequence_mean`; clip at about 0.4, below and above, of the ratio's logarithm), a mask "
        "where policy and sampler diverge (`dppo`, see `dppo`), or a smooth function of a completion's "
        "importance weight (`vespo`, see `vespo`). Or a custom function, `ObjectiveFunction` in "
        "`rlhf_pipeline.functional.objectives`; on a command line `FILE.py:NAME`.",
    )
    clip_low: float | None = setting(
        None,
        above=0,
        below=1,
        help="The ratio of policy to sampler is clipped below `1 - clip_low`. None is 0.2; for `cispo` it is no "
        "lower clip, as in its paper.",
    )
    clip_high: float = setting(0.2, above=0, help="The ratio of policy to sampler is clipped above `1 + clip_high`.")
    aggregation: Aggregation = setting(
        "token_mean",
        help="How the tokens' losses are aggregated: the mean over all tokens, the mean over completions of their "
        "token mean, the mean over groups of their token mean (`group_mean`: every prompt has the same weight), the "
        "mean over completions of their token sum, or the sum over a fixed length (Dr. GRPO).",
    )
    dppo: DPPO = setting(factory=DPPO, help="The trust region of `objective=dppo`.")
    vespo: VESPO = setting(factory=VESPO, help="The weight of `objective=vespo`.")
    entropy_coeff: float = setting(0.0, min=0, help="Weight of the entropy, which is added to the objective.")
    kl_to_ref_coeff: float = setting(
        0.0, min=0, help=("Weight of a KL term in the loss, in addition to the KL term in the reward.")
    )
    kl_estimator: KLEstimator = setting(
        "k3+",
        help="Estimator of that term: `k3+` has the value of k3 and the gradient of k2, which is correct on-policy.",
    )
    kl_importance_weight: bool = setting(
        False,
        help="Weight that term by the ratio of policy to sampler, for stale trajectories.",
    )
    dual_clip: float | None = setting(
        None,
        above=1,
        help="If the advantage A is negative, the loss is at most `-dual_clip * A`. The paper uses 3.",
    )
    delta: float | None = setting(None, above=1, help="Upper bound of the ratio where it is not clipped.")
    tis_cap: float | None = setting(
        None,
        above=0,
        help="Truncated importance sampling: weight the policy loss by `min(exp(trainer - sampler log-prob), "
        "tis_cap)`. The trainer's log-probs of a trajectory are computed before the first step that uses it, "
        "and retained for later steps as the clip's reference; this needs an additional forward pass per "
        "trajectory.",
    )
    tis_level: Level = setting(
        "token",
        help="For `tis_cap`: one weight per token, or one weight per completion, which is the product over its tokens.",
    )
    tis_floor: float | None = setting(None, min=0, help="Lower bound of the weight of `tis_cap`.")
    icepop: MaskLevel | None = setting(
        None,
        help="Weight tokens, or complete completions, in the policy loss by `exp(trainer - sampler log-prob)` if "
        "that is between `icepop_low` and `icepop_high`, otherwise by 0. For a completion it is the geometric "
        "mean over its tokens (`sequence`) or their product (`product`). With `tis_cap`, the weight inside the "
        "bounds is that of `tis_cap`.",
    )
    icepop_low: float = setting(0.5, min=0, help="See `icepop`.")
    icepop_high: float = setting(5.0, above=0, help="See `icepop`.")
    off_policy_threshold: float | None = setting(
        None,
        above=0,
        help="Exclude completions with a negative advantage from the policy loss if the mean of `sampler - current "
        "log-prob` over their tokens is above this, in nats (DeepSeek-V3.2). The head is computed a second "
        "time.",
    )
    top_entropy_quantile: float = setting(
        1.0,
        above=0,
        max=1,
        help="The share of a step's tokens, with the highest entropy, that have a policy loss; 0.2 in "
        "arXiv:2506.01939. The other tokens still count in averages, as in TRL. Needs an additional forward "
        "pass, and a single process.",
    )
    clip_cov: float | None = setting(
        None,
        above=0,
        max=1,
        help="The share of a step's tokens, at least one, that have no policy loss. They are drawn from the tokens "
        "whose covariance of log-prob and advantage is between `clip_cov_low` and `clip_cov_high`; 0.0002 in "
        "arXiv:2505.22617. The other tokens keep their weight, as in verl. For `grpo`. Needs an additional "
        "forward pass, and a single process.",
    )
    clip_cov_low: float = setting(1.0, help="See `clip_cov`.")
    clip_cov_high: float = setting(5.0, help="See `clip_cov`.")
    sapo_tau_positive: float = setting(1.0, above=0, help="For `sapo`: steepness of the gate for a positive advantage.")
    sapo_tau_negative: float = setting(1.05, above=0, help="The same for other advantages.")

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
        """Whether tokens are chosen from those of a whole step."""
        return self.top_entropy_quantile < 1 or self.clip_cov is not None

    @property
    def corrects_the_sampler(self) -> bool:
        """Whether the trainer's own log-probs are needed besides the sampler's."""
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
                f"{self.objective} has no minimum that dual_clip or delta could bound: they belong to PPO's clip, "
                f"which {self.objective} does not use.",
            ),
            (
                not self.corrects_the_sampler or self.objective not in ("dppo", "vespo"),
                f"{self.objective} already compares the policy with the sampler, so tis_cap and icepop would "
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
    """The optimizer and the loop."""

    steps: int = setting(100, min=1, help="Maximum number of optimizer steps.")
    epochs: int = setting(
        1,
        min=1,
        help="Passes over each rollout before the next one is collected. A pass is one optimizer step on the "
        "complete rollout unless `minibatches` or `sample` changes this.",
    )
    minibatches: int = setting(
        1,
        min=1,
        help="Number of random, disjoint parts into which each pass divides a rollout, with one optimizer step per "
        "part. For `sample.strategy=fresh`; with `replay` and no `sample.batch_size`, a step takes the number "
        "of trajectories in a part.",
    )
    episode_weight: Literal["one", "rows"] = setting(
        "one",
        help="Whether an episode of several rows counts as one trajectory in the loss (`one`), or each row counts "
        "as one, as in verl and SkyRL (`rows`); see `token_weights` in `rlhf_pipeline.functional.aggregation`.",
    )
    lr: float = setting(1e-3, above=0, help="Learning rate of AdamW.")
    warmup_steps: int = setting(0, min=0, help="Optimizer steps in which the learning rate rises from 0.")
    warmup_ratio: float = setting(
        0.0,
        min=0,
        below=1,
        help="The same as a share of the steps until the end of the schedule (`lr_decay_steps`, otherwise `steps`), "
        "rounded up; set only one of the two.",
    )
    min_lr: float = setting(0.0, min=0, help="The final value of a decreasing learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = setting(
        "constant",
        help="The learning rate after the warm-up: constant, or decreasing to `min_lr` along a line or a half cosine.",
    )
    lr_decay_steps: int | None = setting(
        None,
        min=1,
        help="Optimizer step at which a decreasing learning rate reaches its final value; None is the step after "
        "`steps`. Set it if the run may be extended later, so that the rate of earlier steps does not change.",
    )
    weight_decay: float = setting(
        0.0,
        min=0,
        help="Decoupled weight decay of AdamW. Norms, biases and position embeddings have none.",
    )
    beta1: float = setting(0.9, min=0, below=1, help="Decay of AdamW's first moment.")
    beta2: float = setting(0.95, min=0, below=1, help="Decay of AdamW's second moment.")
    eps: float = setting(1e-8, above=0, help="Added to the root of AdamW's second moment.")
    max_grad_norm: float = setting(1.0, above=0, help="A larger gradient is scaled down to this norm.")
    optimizer: Literal["adamw", "adamw_8bit"] = setting(
        "adamw",
        help="`adamw_8bit` keeps the moments in 8 bits; needs torchao or bitsandbytes.",
    )
    offload_optimizer: bool = setting(
        False,
        help="Keep master weights and moments in host memory, and run the optimizer step there.",
    )
    activation_checkpointing: bool = setting(
        False,
        help="Recompute each layer in the backward pass: saves memory for a third more computation.",
    )
    reference_every: int = setting(
        0,
        min=0,
        help="Optimizer steps between two updates of the reference model; 0 keeps it frozen.",
    )
    reference_rate: float = setting(
        1.0,
        above=0,
        max=1,
        help="How far an update moves the reference towards the policy: 1 copies the policy, 0.01 with "
        "`reference_every=1` is an exponential moving average.",
    )
    token_budget: int = setting(
        16_384,
        min=1,
        help="Maximum number of padded tokens in one forward pass; a step runs as many passes as it needs.",
    )
    layout: Literal["auto", "padded", "packed", "prefix_shared"] = setting(
        "auto",
        help="How trajectories share a forward pass: rows of similar length padded to the longest; packed end to "
        "end without padding; or packed with the prompt of a group computed once. `auto` uses the last option "
        "if it costs less and the model allows it, and pads otherwise.",
    )
    compile: Literal["auto", "on", "off"] = setting(
        "auto",
        help="Whether torch.compile fuses the elementwise kernels of norms and MLPs in a step, with the same "
        "results up to rounding; sampling is never compiled. `auto` compiles on CUDA, and runs modules that "
        "fail a check eagerly.",
    )
    stop_at_reward: float | None = setting(
        None,
        help="Stop when the mean task reward of `stop_window` consecutive rollouts reaches this.",
    )
    stop_window: int = setting(
        3, min=1, help=("Number of consecutive rollouts whose mean reward must reach `stop_at_reward`.")
    )
    checkpoint_every: int = setting(10, min=1, help="Optimizer steps between two checkpoints.")
    keep_checkpoints: int = setting(2, min=1, help="Number of checkpoints to keep; older checkpoints are removed.")
    peak_flops: float | None = setting(
        None,
        above=0,
        help="The device's peak floating-point operations per second, for the metric `mfu`. None uses the data "
        "sheet of a known GPU; on a CPU the metric is then omitted.",
    )
    metrics: tuple[Callable[..., Any], ...] = setting(
        (),
        help="Functions that add custom figures to each step's line, `MetricFunction` in "
        "`rlhf_pipeline.learner.metrics`; on a command line `FILE.py:NAME`.",
    )
    keep_token_figures: bool = setting(
        False,
        help="Store the policy's log-prob and entropy of each token when a step uses it, so that `view` shows ratio "
        "and entropy; a later step replaces the values. Needs an additional forward pass per step, and 8 bytes "
        "per token.",
    )
    logger: Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"] | None = setting(
        None,
        help="Also send each step's metrics to this TorchRL logger, which writes under the run folder.",
    )
    logger_project: str | None = setting(None, help="The project in W&B or Trackio; None for the default.")
    logger_name: str | None = setting(None, help="The name of the run in the logger; None for the name of its folder.")
    logger_tags: tuple[str, ...] = setting((), help="The tags of the run in W&B.")
    logger_samples: int = setting(
        0,
        min=0,
        help="Number of trajectories of each step in a W&B table: prompt, completion, reward and advantage.",
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
        """Optimizer steps of the warm-up, however it is given."""
        last = self.steps if self.lr_decay_steps is None else self.lr_decay_steps - 1
        return self.warmup_steps or math.ceil(self.warmup_ratio * last)

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.lr_schedule == "constant" or (self.lr_decay_steps or self.steps + 1) > self.warmup_steps,
                f"lr_schedule={self.lr_schedule} ends at step {self.lr_decay_steps or self.steps + 1}, within the "
                f"{self.warmup_steps} of warmup_steps. Set lr_decay_steps to a larger value.",
            ),
            (
                not (self.warmup_steps and self.warmup_ratio),
                f"warmup_steps is {self.warmup_steps} and warmup_ratio {self.warmup_ratio}: the warm-up is given "
                "twice. Set one of them to 0.",
            ),
            (
                self.min_lr <= self.lr,
                f"min_lr is {self.min_lr}, above lr ({self.lr}), from which the rate decreases. Set it to at most lr.",
            ),
            (
                self.logger_project is None or self.logger in ("wandb", "trackio"),
                f"logger_project is for logger=wandb and trackio, but the logger is {self.logger}.",
            ),
            (
                self.logger == "wandb" or not (self.logger_tags or self.logger_samples),
                f"logger_tags and logger_samples are for logger=wandb, but the logger is {self.logger}.",
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

    name: str = setting(help="The run's name in its output.")
    policy: TinyPolicy | PretrainedPolicy = setting(help="The model: made from scratch, or from a checkpoint.")
    prompts: PromptSource = setting(factory=NoPrompts, help="The source of prompts; not needed with `replay`.")
    reward: RewardFunction | Reward | tuple[RewardFunction | Reward, ...] = setting(
        no_reward,
        help="`(prompt, completion, answer, meta) -> float`, a function with other arguments, or several functions, "
        "each directly or in `Reward(function, weight=, name=)`; see docs/rewards.md. A call that raises fails "
        "its trajectory, not the run. Not needed with `replay`.",
    )
    environment: Callable[..., Any] | dict[str, Any] | None = setting(
        None,
        help="What responds to the policy's turns: a class with `reset` and `step`, tools, an environment of "
        "another library, or several by name, selected by the column `environment` of the prompts; see "
        "docs/environments.md. None samples one turn.",
    )
    description: str = setting("", help="One line for `rlhf-pipeline list`.")
    needs: str = setting("nothing", help="Prerequisites, one phrase for `rlhf-pipeline list`.")
    collect: Collect = setting(factory=Collect, help="How completions are sampled.")
    write: WritePath = setting(factory=WritePath, help="The processing of a trajectory before it is stored.")
    buffer: Buffer = setting(factory=Buffer, help="Where trajectories live.")
    sample: Sample = setting(factory=Sample, help="Which trajectories a step learns from.")
    loss: GRPO = setting(factory=GRPO, help="The loss.")
    learn: Learn = setting(factory=Learn, help="The optimizer and the loop.")
    replay: Replay | None = setting(None, help="Learn from stores without sampling; None samples.")
    evaluate: Evaluate | dict[str, Evaluate] | None = setting(
        None,
        help="Evaluate the policy on other prompts from time to time, on one set or on several by name, "
        '`{"gsm8k": Evaluate(...)}`; see docs/evaluation.md. None does not.',
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
        """The evaluations by the name of their set; a single one has none."""
        return evaluation_sets(self.evaluate)

    @property
    def environment_rewards(self) -> tuple[str, ...]:
        """The names of the environment's rewards that are known: it declares them, or `reward` names them."""
        if self.environment is None:
            return ()
        selected = [reward.function for reward in rewards_of(self.reward)]
        declared = [function.name for function in selected if isinstance(function, EnvironmentReward)]
        return tuple(dict.fromkeys([*(rewards_of_environment(maker_of(self.environment)) or ()), *declared]))

    @property
    def reward_weights(self) -> dict[str, float]:
        """The rewards that have a column `reward_NAME` each, with their weights; see `data.rewards.reward_weights`."""
        return reward_weights(self.reward, self.environment_rewards)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The names of all rewards that are known before anything is sampled; results may have further components."""
        labels = [reward.label for reward in rewards_of(self.reward)] if has_columns(self.reward) else []
        return tuple(dict.fromkeys([*labels, *self.reward_weights]))

    @property
    def step_size(self) -> int:
        """Trajectories of a step if `sample.batch_size` is not set."""
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
                "none, because there is only one function; give it a name: Reward(f, name=...)"
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
                "it needs prompts, for example prompts=CopyDigits(), or replay=Replay() to learn from stores.",
            ),
            (
                not any(isinstance(evaluation.prompts, NoPrompts) for evaluation in self.evaluations.values()),
                "evaluate: it needs prompts that the run does not learn from.",
            ),
            (
                self.replay is not None or self.reward is not no_reward,
                "it needs a reward function: (prompt, completion, answer, meta) -> float; or an environment.",
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
                    f"the name {name!r} of a set of evaluate is not a valid folder name: use letters, digits and "
                    "underscores.",
                )
                for name in self.evaluations
            ),
            (
                sum(evaluation.best is not None and evaluation.keep_best for evaluation in self.evaluations.values())
                <= 1,
                "several sets of evaluate set `best`, but only one set may choose the best checkpoint.",
            ),
            (
                self.evaluate is None or len(self.evaluations) > 0,
                "evaluate is an empty dict. Add a set, or omit it.",
            ),
            (
                self.environment is None or not self.collect.prefill,
                f"collect.prefill is {self.collect.prefill!r}, but the conversations of an environment have several "
                "turns. End the generation prompt of policy.chat_template with this text.",
            ),
            (
                self.evaluate is None or self.reward is not no_reward,
                "evaluate needs a reward function, also with replay.",
            ),
            (
                self.curriculum is None or (room is None and self.collect.dynamic == 1 and not self.write.drops_groups),
                "a curriculum uses the success rate of every group, but buffer.max_trajectories, collect.dynamic "
                "and write.zero_variance=drop each remove groups from the store. Omit these settings, or "
                "prompts.curriculum.",
            ),
            (
                room is None or room >= rollout,
                f"buffer.max_trajectories is {room}, but one rollout has {rollout} trajectories. Set it to at least "
                "that number.",
            ),
            (
                not (self.learn.reference_every and self.policy.lora_rank),
                "learn.reference_every updates a reference model, but with policy.lora_rank there is none: the "
                "reference is the model with its adapters switched off. Set one of the two to 0.",
            ),
            (
                self.collect.engine == "slots" or not self.policy.lora_rank,
                f"collect.engine={self.collect.engine} loads complete models, not adapters. Set policy.lora_rank=0, "
                "or collect.engine=slots.",
            ),
            (
                self.replay is not None or self.collect.group_size > 1 or self.write.estimator == "reinforce_pp",
                f"collect.group_size is 1, but write.estimator={self.write.estimator} compares the members of a "
                "group: every advantage would be 0. Set collect.group_size to 2 or more, or "
                "write.estimator=reinforce_pp.",
            ),
            (
                (self.write.min_group_size or 1) <= self.collect.group_size,
                f"write.min_group_size is {self.write.min_group_size}, but a group has {self.collect.group_size} "
                "members (collect.group_size). Set it to at most that number.",
            ),
            (
                self.replay is not None or self.sample.strategy != "fresh" or self.sample.batch_size is None,
                "sample.strategy=fresh uses the complete newest rollout, or learn.minibatches parts of it, so "
                "sample.batch_size cannot be set.",
            ),
            (
                parts == 1 or self.sample.strategy == "fresh",
                f"learn.minibatches is {parts}: parts of the newest rollout, but "
                f"sample.strategy={self.sample.strategy} draws its batches independently. Set sample.batch_size, "
                "and learn.epochs for the number of batches.",
            ),
            (
                parts <= rollout,
                f"learn.minibatches is {parts}, but a rollout has {rollout} trajectories. Set it to at most that "
                "number.",
            ),
            (
                self.replay is not None
                or self.sample.strategy != "fresh"
                or (self.sample.max_uses or epochs) >= epochs,
                f"learn.epochs is {epochs}, and each uses the complete newest rollout, but sample.max_uses is "
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
                "uniformly with --set sample.strategy=uniform, or repeat the order of the run that filled the store "
                "with --set replay.recorded_order=true.",
            ),
        ]
