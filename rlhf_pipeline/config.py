"""What a pipeline is: frozen dataclasses that say everything and build nothing.

A definition is a function that returns a `Pipeline`. It is plain data, so it can be listed, printed, compared on
resume, written to the run folder and rebuilt in another process, all without importing torch.

>>> from rlhf_pipeline import Pipeline, override
>>> from rlhf_pipeline.prompts import CopyDigits
>>> from rlhf_pipeline.rewards import token_match
>>> pipeline = Pipeline(name="demo", policy=TinyPolicy(), prompts=CopyDigits(), reward=token_match)
>>> override(pipeline, "learn.lr", "3e-4").learn.lr
0.0003
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.prompts import NoPrompts, PromptSource
from rlhf_pipeline.rewards import RewardFunction, no_reward

Estimator = Literal["grpo", "dr_grpo", "mean", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "dr_grpo"]


def _literal_of(hint: Any) -> Any:
    """Return the `Literal` of `Literal[...] | None`, and any other hint as it is."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next((option for option in typing.get_args(hint) if typing.get_origin(option) is Literal), hint)
    return hint


class _Checked:
    """Checks every `Literal` field and then the rules of the class, at construction."""

    __slots__ = ()

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for item in dataclasses.fields(cast(Any, self)):
            hint, value = _literal_of(hints[item.name]), getattr(self, item.name)
            if value is None and hint is not hints[item.name]:
                continue
            if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
                raise DefinitionError(
                    f"{type(self).__name__}.{item.name} is {value!r}."
                    + did_you_mean(str(value), map(str, typing.get_args(hint)))
                )
        for holds, rule in self._rules():
            if not holds:
                raise DefinitionError(f"{type(self).__name__}: {rule}")

    def _rules(self) -> list[tuple[bool, str]]:
        return []


def _lora_rules(rank: int, alpha: float, targets: str) -> list[tuple[bool, str]]:
    return [
        (rank >= 0, f"lora_rank is {rank}; it must not be negative."),
        (0 < alpha < math.inf, f"lora_alpha is {alpha}; it must be above 0 and finite."),
        (all(name.strip() for name in targets.split(",")), f"lora_targets {targets!r} names no module."),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyPolicy(_Checked):
    """A small causal language model made from scratch, with one token per character."""

    alphabet: str = "0123456789="
    """Every character that may occur."""
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    lora_rank: int = 0
    """Rank of LoRA adapters; 0 trains every weight. See `PretrainedPolicy.lora_rank`."""
    lora_alpha: float = 32.0
    lora_targets: str = "all-linear"

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            *_lora_rules(self.lora_rank, self.lora_alpha, self.lora_targets),
            (
                len(set(self.alphabet)) == len(self.alphabet) > 0,
                f"alphabet {self.alphabet!r} repeats itself or is empty.",
            ),
            (
                self.num_heads >= 1 and self.hidden_size % self.num_heads == 0,
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}.",
            ),
            (self.num_layers >= 1, f"num_layers is {self.num_layers}; it must be at least 1."),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedPolicy(_Checked):
    """A causal language model from a checkpoint folder, or from the Hugging Face hub by name."""

    path: str
    """A folder as `save_pretrained` writes it, or a hub name. Only a hub name touches the network."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in. With bfloat16 the optimizer keeps float32 master weights."""
    lora_rank: int = 0
    """Rank of LoRA adapters, the only weights that are then trained; 0 trains every weight. Needs peft. The model with
    its adapters off is the reference, so no second model is held."""
    lora_alpha: float = 32.0
    """The adapters' output is scaled by `lora_alpha / lora_rank`."""
    lora_targets: str = "all-linear"
    """The modules that get an adapter: `all-linear` (all but the head), or names with commas between them, for
    example `q_proj,v_proj`."""

    def _rules(self) -> list[tuple[bool, str]]:
        return _lora_rules(self.lora_rank, self.lora_alpha, self.lora_targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collect(_Checked):
    """How completions are sampled."""

    prompts_per_rollout: int = 16
    """Prompts in one rollout; each gets a whole group."""
    group_size: int = 16
    """Completions per prompt."""
    max_new_tokens: int = 64
    temperature: float = 1.0
    num_slots: int = 64
    """Completions that are generated side by side."""

    refresh_weights_every: int = 0
    """Of a collector beside a learner: sampled tokens of each slot after which it looks for newer weights and goes on
    with them, in the middle of completions; 0 takes them up between rollouts only. The log-probs stay those of the
    weights that sampled each token; the prompt and what was sampled before are not computed again."""

    @property
    def rollout_size(self) -> int:
        """Trajectories in one rollout."""
        return self.prompts_per_rollout * self.group_size

    def _rules(self) -> list[tuple[bool, str]]:
        counts = ("prompts_per_rollout", "group_size", "max_new_tokens", "num_slots")
        return [
            *((getattr(self, n) >= 1, f"{n} is {getattr(self, n)}; it must be at least 1.") for n in counts),
            (self.temperature > 0, f"temperature is {self.temperature}; it must be above 0."),
            (
                self.refresh_weights_every >= 0,
                f"refresh_weights_every is {self.refresh_weights_every}; it must not be negative.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePath(_Checked):
    """What happens to a completed trajectory before it is stored."""

    estimator: Estimator = "grpo"
    """How a group's returns become advantages; the formulas are in `rlhf_pipeline.functional.advantage`."""
    kl_coef: float = 0.0
    """Weight of the k1 penalty in the reward. 0 needs no reference model."""
    kl_target: float | None = None
    """Mean KL per trajectory (nats) that an adaptive controller steers to; None keeps `kl_coef` constant."""
    kl_horizon: int = 10_000
    """Trajectories over which the adaptive controller acts."""
    zero_variance: Literal["keep", "drop", "mark"] = "keep"
    """What to do with a group whose returns are all equal."""
    min_group_size: int | None = None
    """Members of a group that are enough once `group_timeout_s` is over; None waits for all."""
    group_timeout_s: float | None = None
    """Seconds from a group's first member until it may close early; None never. Goes with `min_group_size`."""

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (self.kl_coef >= 0, f"kl_coef is {self.kl_coef}; it must not be negative."),
            (
                self.kl_target is None or self.kl_coef > 0,
                "kl_target needs a kl_coef above 0 to start from.",
            ),
            (
                (self.min_group_size is None) == (self.group_timeout_s is None),
                "min_group_size and group_timeout_s go together: how many are enough, and after how long.",
            ),
            (
                self.min_group_size is None or self.min_group_size >= 1,
                f"min_group_size is {self.min_group_size}; it must be at least 1.",
            ),
            (
                self.group_timeout_s is None or 0 <= self.group_timeout_s < math.inf,
                f"group_timeout_s is {self.group_timeout_s}; it must be finite and not negative.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer(_Checked):
    """Where trajectories live and which of them the learner may see."""

    backend: Literal["memmap", "zarr"] = "memmap"
    durability: Literal["process", "power", "group"] = "process"
    """What an acknowledged trajectory survives: `process` kill -9, `power` and `group` a power loss as well."""
    max_trajectories: int | None = None
    """Keep at most this many; the oldest go first. None keeps all."""
    max_staleness: int = 0
    """Largest age of a sampled trajectory, in optimizer steps since the weights that produced it."""

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.max_staleness >= 0,
                f"max_staleness is {self.max_staleness}; it must not be negative.",
            )
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample(_Checked):
    """Which of the stored trajectories an optimizer step learns from, of those that `Buffer.max_staleness` allows.

    The choice is a function of what the store held, the seed and the step, and the ledger records it.
    """

    strategy: Literal["fresh", "uniform", "recency", "priority", "group", "success", "variance", "mix"] = "fresh"
    """`fresh`: all trajectories that are young enough, in a run the newest rollout; with `replay`, every one once
    per epoch, groups together, in a new order each time, `batch_size` in a step. The others draw `batch_size`:
    `uniform` all alike; `recency` by age; `priority` by the size of the advantage and age; `group` whole groups;
    `success` whole groups of medium success rate; `variance` whole groups whose rewards vary; `mix` a part from the
    newest rollout and the rest by age. See `rlhf_pipeline.replay.samplers`."""
    batch_size: int | None = None
    """Trajectories per step; None takes as many as a rollout has. Not for `fresh`, unless with `replay`."""
    tau: float | None = None
    """Age in optimizer steps at which the chance of a trajectory has fallen to 1/e; None ignores the age."""
    alpha: float = 1.0
    """How much the advantage (`priority`) or the variance (`variance`) counts."""
    fresh_fraction: float = 0.5
    """Of `mix`: the part of a batch that comes from the newest rollout."""
    max_uses: int | None = None
    """Steps after which a trajectory is used up; None sets no limit."""
    min_ess: float | None = None
    """Trajectories of one age count less where their effective sample size, as a share of their tokens, is below this;
    see `rlhf_pipeline.replay.ess_guard`. Costs one more forward pass where a batch is stale. None counts all alike."""
    skip_below_ess: float = 0.1
    """Trajectories of one age are left out below this share; goes with `min_ess`."""

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (self.batch_size is None or self.batch_size >= 1, f"batch_size is {self.batch_size}; at least 1, or None."),
            (self.tau is None or self.tau > 0, f"tau is {self.tau}; it must be above 0, or None."),
            (self.strategy != "recency" or self.tau is not None, "strategy=recency needs tau, for example tau=8."),
            (self.alpha >= 0, f"alpha is {self.alpha}; it must not be negative."),
            (0 <= self.fresh_fraction <= 1, f"fresh_fraction is {self.fresh_fraction}; it must lie between 0 and 1."),
            (self.max_uses is None or self.max_uses >= 1, f"max_uses is {self.max_uses}; at least 1, or None."),
            (
                self.min_ess is None or 0 <= self.skip_below_ess <= self.min_ess <= 1,
                f"min_ess ({self.min_ess}) must lie between skip_below_ess ({self.skip_below_ess}) and 1.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay(_Checked):
    """Learn from stores alone: nothing is sampled from the policy.

    The chosen trajectories are copied into the run's own store first, through the write path where reference or
    behaviour log-probs or advantages are missing, so the stores themselves are never changed.
    """

    stores: tuple[str, ...] = ()
    """Stores, or run folders, whose trajectories are learned from; `rlhf-pipeline replay STORE...` fills this in."""
    weights: tuple[float, ...] = ()
    """Of each batch, how much comes from each store; none given draws from all as from one."""
    filters: tuple[str, ...] = ()
    """Conditions that all trajectories meet: `reward>=0.5`, `version<100`, `num_tokens<=512`, `date>=2026-01-31`."""
    epochs: float | None = None
    """Stop when the steps have used as many trajectories as `epochs` times those there are; None is up to
    `learn.steps`."""
    recorded_order: bool = False
    """Step k learns from what the run that filled the store learned from at step k, by policy version. Needs one
    store."""

    def _rules(self) -> list[tuple[bool, str]]:
        return [
            (
                not self.weights or not self.stores or len(self.weights) == len(self.stores),
                f"{len(self.weights)} weights for {len(self.stores)} stores. Give each store one, or give none.",
            ),
            (
                all(0 < weight < math.inf for weight in self.weights),
                f"weights are {self.weights}; all must be above 0 and finite.",
            ),
            (self.epochs is None or 0 < self.epochs < math.inf, f"epochs is {self.epochs}; it must be above 0."),
            (
                not self.recorded_order or (len(self.stores) <= 1 and self.epochs is None),
                "recorded_order goes with one store and without epochs.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(_Checked):
    """The loss."""

    objective: Literal["grpo", "cispo", "gspo"] = "grpo"
    """PPO's clip on token ratios, CISPO's clipped weight, or PPO's clip on sequence ratios (clip at about 3e-4)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token_mean"
    entropy_coeff: float = 0.0
    kl_to_ref_coeff: float = 0.0
    """Weight of a KL term in the loss, beside the one in the reward."""
    kl_estimator: Literal["k3+", "k3", "k2"] = "k3+"
    """Of that term: `k3+` has the value of k3 and the gradient of k2, the right one on-policy."""
    kl_importance_weight: bool = False
    """Weight that term by policy over sampler, within the clip bounds, for stale trajectories."""
    dual_clip: float | None = None
    """Above 1: where the advantage A is negative the loss is at most `-dual_clip * A`. 3 in the paper."""
    delta: float | None = None
    """Upper bound of the ratio where it is not clipped."""
    tis_cap: float | None = None
    """Truncated importance sampling: weight the policy loss by `min(exp(trainer - sampler log-prob), tis_cap)`. The
    trainer's log-probs of a trajectory are taken before the first step that uses it and kept for its later ones, as
    what the clip is against; one more forward pass per trajectory."""
    tis_level: Literal["token", "sequence"] = "token"
    icepop: Literal["token", "sequence"] | None = None
    """Leave tokens, or whole completions, out of the policy loss whose `exp(trainer - sampler log-prob)`, of a
    completion its geometric mean, lies outside `icepop_low` and `icepop_high`."""
    icepop_low: float = 0.5
    icepop_high: float = 5.0

    @property
    def corrects_the_sampler(self) -> bool:
        """Whether the trainer's own log-probs are needed beside the sampler's."""
        return self.tis_cap is not None or self.icepop is not None

    def _rules(self) -> list[tuple[bool, str]]:
        bounded = self.dual_clip is not None or self.delta is not None
        return [
            (0 < self.clip_low < 1, f"clip_low is {self.clip_low}; it must lie between 0 and 1."),
            (self.clip_high > 0, f"clip_high is {self.clip_high}; it must be above 0."),
            (self.entropy_coeff >= 0, f"entropy_coeff is {self.entropy_coeff}; it must not be negative."),
            (self.kl_to_ref_coeff >= 0, f"kl_to_ref_coeff is {self.kl_to_ref_coeff}; it must not be negative."),
            (self.dual_clip is None or self.dual_clip > 1, f"dual_clip is {self.dual_clip}; it must be above 1."),
            (
                self.delta is None or self.delta > 1 + self.clip_high,
                f"delta is {self.delta}; it must be above 1 + clip_high, {1 + self.clip_high}.",
            ),
            (not (bounded and self.objective == "cispo"), "cispo has no min that dual_clip or delta could bound."),
            (self.tis_cap is None or self.tis_cap > 0, f"tis_cap is {self.tis_cap}; it must be above 0."),
            (
                0 <= self.icepop_low < self.icepop_high,
                f"icepop_low is {self.icepop_low}; it must lie between 0 and icepop_high, {self.icepop_high}.",
            ),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Learn(_Checked):
    """The optimizer and the loop."""

    steps: int = 100
    """Optimizer steps at most."""
    updates_per_rollout: int = 1
    """Optimizer steps on each rollout before the next one is collected."""
    lr: float = 1e-3
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` keeps the moments in 8 bits; needs torchao or bitsandbytes."""
    offload_optimizer: bool = False
    """Keep master weights and moments in the memory of the host; the step is taken there."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory for a third more work."""
    reference_every: int = 0
    """Optimizer steps between two updates of the reference model; 0 keeps it frozen."""
    reference_rate: float = 1.0
    """How far an update moves the reference to the policy: 1 copies the policy, 0.01 with `reference_every=1` is an
    exponential moving average."""
    token_budget: int = 16_384
    """Padded tokens in one forward pass; a step takes as many as it needs."""
    layout: Literal["padded", "packed", "prefix_shared"] = "padded"
    """How trajectories share a forward pass: rows of similar length padded to the longest; without padding, one behind
    the other; or the same with the prompt of a group computed once."""
    stop_at_reward: float | None = None
    """Stop when the mean task reward of `stop_window` rollouts in a row reaches this."""
    stop_window: int = 3
    checkpoint_every: int = 10
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: int = 2
    peak_flops: float | None = None
    """What the device can do, in floating-point operations per second, for the metric `mfu`. None takes the data sheet
    of a known GPU; on a CPU the metric is then left out."""
    logger: Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"] | None = None
    """Also send each step's metrics to this logger of TorchRL, which writes under the run folder."""

    def _rules(self) -> list[tuple[bool, str]]:
        counts = (
            "steps",
            "updates_per_rollout",
            "token_budget",
            "stop_window",
            "checkpoint_every",
            "keep_checkpoints",
        )
        return [
            *((getattr(self, n) >= 1, f"{n} is {getattr(self, n)}; it must be at least 1.") for n in counts),
            (0 < self.lr < math.inf, f"lr is {self.lr}; it must be above 0 and finite."),
            (self.warmup_steps >= 0, f"warmup_steps is {self.warmup_steps}; it must not be negative."),
            (0 <= self.weight_decay < math.inf, f"weight_decay is {self.weight_decay}; it must not be negative."),
            (
                0 <= self.beta1 < 1 and 0 <= self.beta2 < 1,
                f"beta1, beta2 are {self.beta1}, {self.beta2}; not in [0, 1).",
            ),
            (self.max_grad_norm > 0, f"max_grad_norm is {self.max_grad_norm}; it must be above 0."),
            (self.reference_every >= 0, f"reference_every is {self.reference_every}; it must not be negative."),
            (0 < self.reference_rate <= 1, f"reference_rate is {self.reference_rate}; it must lie above 0, up to 1."),
            (
                self.peak_flops is None or 0 < self.peak_flops < math.inf,
                f"peak_flops is {self.peak_flops}; it must be above 0 and finite, for example 9.9e14.",
            ),
            (
                not (self.offload_optimizer and self.optimizer == "adamw_8bit"),
                "offload_optimizer and optimizer=adamw_8bit do not go together; choose one.",
            ),
            (self.stop_at_reward is None or math.isfinite(self.stop_at_reward), "stop_at_reward is not finite."),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline(_Checked):
    """One training run, whole: policy, prompts, reward, write path, buffer, loss and loop."""

    name: str
    policy: TinyPolicy | PretrainedPolicy
    prompts: PromptSource = field(default_factory=NoPrompts)
    """Where prompts come from; not needed with `replay`."""
    reward: RewardFunction = no_reward
    """`(prompt, completion, answer, meta) -> float`. A call that raises fails its trajectory, not the run. Not needed
    with `replay`."""
    description: str = ""
    """One line for `rlhf-pipeline list`."""
    needs: str = "nothing"
    """What must be there first, one phrase for `rlhf-pipeline list`."""
    collect: Collect = field(default_factory=Collect)
    write: WritePath = field(default_factory=WritePath)
    buffer: Buffer = field(default_factory=Buffer)
    sample: Sample = field(default_factory=Sample)
    loss: GRPO = field(default_factory=GRPO)
    learn: Learn = field(default_factory=Learn)
    replay: Replay | None = None
    """Learn from stores and sample nothing; None collects."""

    def _rules(self) -> list[tuple[bool, str]]:
        last_update = self.learn.updates_per_rollout - 1
        rollout, room = self.collect.rollout_size, self.buffer.max_trajectories
        return [
            (
                self.replay is not None or not isinstance(self.prompts, NoPrompts),
                "it needs prompts, for example prompts=CopyDigits(), or replay=Replay() to learn from stores.",
            ),
            (
                self.replay is not None or self.reward is not no_reward,
                "it needs a reward function: (prompt, completion, answer, meta) -> float.",
            ),
            (
                room is None or room >= rollout,
                f"buffer.max_trajectories is {room}, and one rollout has {rollout} trajectories. Keep that many.",
            ),
            (
                not (self.learn.reference_every and self.policy.lora_rank),
                "learn.reference_every moves a reference model, and with policy.lora_rank there is none: the reference "
                "is the model with its adapters off. Set one of the two to 0.",
            ),
            (
                (self.write.min_group_size or 1) <= self.collect.group_size,
                f"write.min_group_size is {self.write.min_group_size}, and a group has {self.collect.group_size} "
                "members (collect.group_size). Set it to that at most.",
            ),
            (
                self.replay is not None or self.sample.strategy != "fresh" or self.sample.batch_size is None,
                "sample.strategy=fresh takes all of the newest rollout: no sample.batch_size.",
            ),
            (
                callable(self.reward),
                f"reward is {self.reward!r}; it must be a function (prompt, completion, answer, meta) -> float.",
            ),
            (
                self.replay is not None or self.buffer.max_staleness >= last_update,
                f"learn.updates_per_rollout is {self.learn.updates_per_rollout}, so the last update sees trajectories "
                f"of age {last_update}, but buffer.max_staleness is {self.buffer.max_staleness}. "
                f"Set buffer.max_staleness to at least {last_update}.",
            ),
        ]
