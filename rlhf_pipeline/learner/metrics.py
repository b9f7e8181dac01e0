"""The figures of a step's metrics line."""

from __future__ import annotations

import dataclasses
import inspect
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf_pipeline.errors import DefinitionError, function_name
from rlhf_pipeline.functional.diagnostics import training_flops
from rlhf_pipeline.functional.kl import kl_figures
from rlhf_pipeline.learner.step_plan import StepPlan
from rlhf_pipeline.losses.grpo import GRPOLossOutput
from rlhf_pipeline.losses.loss_batch import LossBatch
from rlhf_pipeline.policies.token_policy import TokenPolicy
from trajectory_store import TrajectoryStore

if TYPE_CHECKING:
    from rlhf_pipeline.learner.distributed import Shards

Metrics = dict[str, float | int | None]

PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16 operations per second by part of the device's name, from the manufacturers' data sheets."""

_LOSS_FIGURES = (
    *("loss_objective", "loss_entropy", "loss_kl_to_ref", "loss_kl_to_inference"),
    *("clip_fraction", "clip_fraction_low", "clip_fraction_high"),
    *("kl_approx", "kl_to_ref", "kl_to_inference", "sampler_gap", "entropy", "ess_sequence", "ess"),
)
"""Fields of the loss's output by their names in a metrics line; TorchRL calls the last one `ESS`."""

_KL = ("kl_k1", "kl_k2", "kl_k3", "kl_per_trajectory")


def loss_metrics(output: GRPOLossOutput | None) -> Metrics:
    """Return the loss's figures for a metrics line, with every name; None for a figure that is missing."""
    values = {name: getattr(output, "ESS" if name == "ess" else name, None) for name in _LOSS_FIGURES}
    values = {"loss": output.total_loss() if output is not None else None, **values}
    present = {name: value.double() for name, value in values.items() if value is not None}
    # One copy from the device: a step waits for each.
    figures = dict(zip(present, torch.stack(list(present.values())).tolist() if present else (), strict=True))
    return {name: figures.get(name) for name in values}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """The inputs of the figures about a step's trajectories.

    Attributes:
        step: its number, from 1.
        store: has the trajectories, read by `store.read_scalars("task_reward", row_ids)` and
            `store.read(row_ids, ["completion"])`.
        row_ids: int64 [n].
        advantages: float32 [n].
        ages: int64 [n], in optimizer steps.
        teaches: bool [n], which change the weights: they have a gradient, and weight in the loss; None if not known.
        uses: int64 [n], how many earlier steps used each; None if uses are not counted.
        figures: what the step's line has already, by name.
    """

    step: int
    store: TrajectoryStore
    row_ids: np.ndarray
    advantages: np.ndarray
    ages: np.ndarray
    teaches: np.ndarray | None = None
    uses: np.ndarray | None = None
    figures: Mapping[str, float | int | None] = dataclasses.field(default_factory=dict[str, "float | int | None"])


MetricFunction = Callable[[StepSeen], "float | int | Mapping[str, float | int | None] | None"]
"""A function of one step that returns a custom figure for `metrics.jsonl`, or several by name.

A single figure has the name of the function. If the function raises an exception or returns an invalid value, the
figure is omitted from the line, with one notice. `data_metrics` is an example.
"""


def check_metrics(functions: Sequence[MetricFunction]) -> None:
    """Reject functions that cannot be called with a `StepSeen`, and two of one name."""
    names = [function_name(function) for function in functions]
    for name, function in zip(names, functions, strict=True):
        try:
            inspect.signature(function).bind(None)
        except (TypeError, ValueError) as error:
            raise DefinitionError(
                f"learn.metrics: {name} cannot be called with a step as its only argument ({error}); see "
                "MetricFunction in "
                "rlhf_pipeline.learner.metrics."
            ) from error
        if names.count(name) > 1:
            raise DefinitionError(
                f"learn.metrics has two functions named {name}, so their metrics would have the same key."
            )


def custom_metrics(functions: Sequence[MetricFunction], step_view: StepSeen) -> tuple[Metrics, list[str]]:
    """Return the figures of a user's functions, and what went wrong, one sentence each."""
    all_figures: Metrics = {}
    problems: list[str] = []
    for function in functions:
        name = function_name(function)
        try:
            returned = function(step_view)
            figures = dict(returned) if isinstance(returned, Mapping) else {name: returned}
            figures = {str(key): None if value is None else float(value) for key, value in figures.items()}
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is reported, and the run continues
            figures, text = {name: None}, f"{type(error).__name__}: {error}"
            problems.append(f"the metric {name} failed ({text}); its figure is omitted.")
        if duplicates := sorted(figures.keys() & step_view.figures.keys()):
            problems.append(f"the metric {name} returns {duplicates[0]}, which is already in the line; rename it.")
        all_figures |= {key: value for key, value in figures.items() if key not in step_view.figures}
    return all_figures, problems


def data_metrics(step_view: StepSeen) -> Metrics:
    """Return figures about the step's trajectories.

    `num_groups`, `num_taught`: groups of the trajectories, and how many trajectories change the weights (None if not
    known). `advantage_std`: standard deviation over the trajectories. `staleness`, `staleness_max`: ages in steps.
    `use_count`, `use_count_max`: steps that have used the trajectories, including this one; None without `uses`, the
    number of earlier ones. `kl_coef`: the KL penalty's weight in their reward, or None if they have no penalty.
    """
    store, row_ids, ages, uses = step_view.store, step_view.row_ids, step_view.ages, step_view.uses
    if len(row_ids) == 0:
        unknown = ("advantage_std", "staleness", "staleness_max", "use_count", "use_count_max", "kl_coef")
        return {"num_groups": 0, "num_taught": 0, **dict.fromkeys(unknown)}
    penalised, groups = store.present("kl_coef", row_ids), store.read_scalars("group_id", row_ids)
    return {
        "num_groups": len(np.unique(groups[groups >= 0])),
        "num_taught": None if step_view.teaches is None else int(step_view.teaches.sum()),
        "advantage_std": float(np.std(step_view.advantages, dtype=np.float64)),
        "staleness": float(ages.mean()),
        "staleness_max": int(ages.max()),
        "use_count": None if uses is None else float(uses.mean()) + 1,
        "use_count_max": None if uses is None else int(uses.max()) + 1,
        "kl_coef": float(store.read_scalars("kl_coef", row_ids)[penalised].mean()) if penalised.any() else None,
    }


def kl_metrics(parts: Mapping[int, LossBatch], order: Sequence[Tensor], shards: Shards | None = None) -> Metrics:
    """Return how far the behaviour policy is from the reference.

    `kl_k1`, `kl_k2`, `kl_k3`: means over the policy's tokens, in nats; `kl_per_trajectory`: k1 summed over each
    trajectory, then averaged. All are None if no trajectory has reference log-probs.
    """
    rows_by_place: dict[int, tuple[Tensor, Tensor]] = {}
    for chosen in order:
        part = parts.get(int(chosen[0]))
        if part is None or part.ref is None:
            continue
        has_both = part.candidates & torch.isfinite(part.behaviour) & torch.isfinite(part.ref)
        rows = (values[has_both].split(has_both.sum(1).tolist()) for values in (part.behaviour, part.ref))
        rows_by_place |= dict(zip(chosen.tolist(), zip(*rows, strict=True), strict=True))
    if not rows_by_place and shards is None:
        return dict.fromkeys(_KL)
    pairs = [rows_by_place[at] for at in sorted(rows_by_place)]  # in the step's order, however it was split
    log_probs = [torch.cat(some) for some in zip(*pairs, strict=True)] if pairs else [torch.zeros(0)] * 2
    figures, num = kl_figures(*log_probs), len(log_probs[0])
    if shards is not None:
        sums = shards.total(torch.tensor([num, *(value * num for value in figures.values())], dtype=torch.float64))
        num = int(sums[0])
        figures = dict(zip(figures, (sums[1:] / max(num, 1)).tolist(), strict=True))
    if not num:
        return dict.fromkeys(_KL)
    per_trajectory = figures["k1"] * num / sum(map(len, order))
    return {**{f"kl_{name}": value for name, value in figures.items()}, "kl_per_trajectory": per_trajectory}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCost:
    """The weight counts that give the cost of a model; the formula is `functional.diagnostics.training_flops`."""

    trained: int
    frozen: int
    head: int
    head_is_trained: bool
    layers: int
    width: int

    @classmethod
    def of(cls, policy: TokenPolicy) -> ModelCost:
        """Count the weights of a policy."""
        model: Any = policy.model
        core = model.get_base_model() if hasattr(model, "get_base_model") else model
        config = core.config.get_text_config(decoder=True)
        heads, head_size = (getattr(config, name, None) for name in ("num_attention_heads", "head_dim"))
        width = int(config.hidden_size)
        if isinstance(heads, int) and isinstance(head_size, int):
            width = heads * head_size
        routed = getattr(config, "num_experts_per_tok", None)
        head = policy.head_weight
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        counts = {True: 0, False: 0}
        for parameter in model.parameters():
            if parameter is head or id(parameter) in tables or parameter.ndim < 2:
                continue
            share = routed / parameter.shape[0] if routed and parameter.ndim == 3 else 1
            counts[parameter.requires_grad] += int(parameter.numel() * share)
        return cls(
            trained=counts[True],
            frozen=counts[False],
            head=head.numel(),
            head_is_trained=head.requires_grad,
            layers=int(config.num_hidden_layers),
            width=width,
        )

    def flops(self, lengths: Tensor, scored: Tensor, *, backward: bool = True) -> float:
        """Count the operations of one forward pass over sequences, and of its backward pass.

        Args:
            lengths: int64 [n], real tokens.
            scored: int64 [n], tokens that the head is applied to.
            backward: False counts only the forward pass.
        """
        return training_flops(lengths, scored, **dataclasses.asdict(self), backward=backward)


def peak_flops_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the data sheet's bfloat16 operations per second of a known GPU, else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((PEAK_FLOPS[part] for part in sorted(PEAK_FLOPS, key=len, reverse=True) if part in name), None)


class StepMeter:
    """Measures time, memory and utilisation of a policy's steps."""

    def __init__(self, policy: TokenPolicy, *, peak_flops: float | None, processes: int = 1) -> None:
        self.device = policy.device
        self.cost = ModelCost.of(policy)
        self.peak_flops = peak_flops or peak_flops_of(policy.device, policy.head_weight.dtype)
        self.processes = processes
        self._started = time.perf_counter()

    def start(self) -> None:
        """Begin a step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._started = time.perf_counter()

    def metrics(self, plan: StepPlan) -> Metrics:
        """Return the figures since the start of the step.

        `update_s`: wall time. `processes`: devices that shared the step. `num_tokens`: real tokens that went through
        the model. `num_scored_tokens`: tokens in the loss. `num_unscored_tokens`: tokens of the policy that are not in
        the loss because a log-prob that it reads is not finite. `padding_efficiency`: real tokens over computed
        positions of the rows with a gradient, above 1 if prompts are shared; None if no row has a gradient.
        `update_tokens_per_s`: `num_tokens` per second. `mfu`:
        useful operations per second (forward only for trajectories without a gradient) over the peak of all processes;
        None if the peak is not known. `peak_memory_mb`: the peak of device memory held by tensors in this step; on a
        CPU the peak memory of the process since it started.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        seconds = time.perf_counter() - self._started
        tokens = int(plan.lengths.sum())
        rate = None
        if self.peak_flops and tokens:
            learned, measured = plan.learns, ~plan.learns
            flops = self.cost.flops(plan.lengths[learned], plan.scored[learned])
            flops += self.cost.flops(plan.lengths[measured], plan.scored[measured], backward=False)
            rate = flops / (seconds * self.peak_flops * self.processes)
        return {
            "processes": self.processes,
            "num_tokens": tokens,
            "num_scored_tokens": int(plan.scored.sum()),
            "num_unscored_tokens": int((plan.produced - plan.scored).sum()),
            "padding_efficiency": float(plan.lengths[plan.learns].sum()) / sum(plan.positions)
            if plan.batches
            else None,
            "update_tokens_per_s": tokens / seconds if tokens else None,
            "mfu": rate,
            "peak_memory_mb": peak / 1e6,
            "update_s": seconds,
        }
