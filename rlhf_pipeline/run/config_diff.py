"""The fields of a definition that may change when a run is continued, and the notices about them. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from rlhf_pipeline.config import Learn, Pipeline
from rlhf_pipeline.config_text import override_all, to_json
from rlhf_pipeline.run.inputs import APART

LAST_BITS: Final = "from now on, metrics and weights may differ in their last bits from those of an unchanged run"

_SILENT: Final = frozenset(
    {
        *("description", "needs", "buffer.max_bytes", "collect.engine_memory", "learn.peak_flops", "learn.metrics"),
        *("learn.logger", *(f"learn.logger_{name}" for name in ("project", "name", "tags", "samples"))),
        *("learn.stop_at_reward", "learn.stop_window", "learn.keep_token_figures"),
        *("learn.checkpoint_every", "learn.keep_checkpoints", "learn.activation_checkpointing"),
        *("collect.reward_concurrency", "collect.call_threads", "collect.alarm_failed"),
    }
)
"""Fields that affect when to stop, save and report, and how much is in memory or runs concurrently, but not what is
learned."""

_WITH_CONSEQUENCE: Final[Mapping[str, str]] = {
    **dict.fromkeys(("learn.token_budget", "learn.layout", "learn.compile", "learn.offload_optimizer"), LAST_BITS),
    "collect.reward_timeout_s": "from now on, reward calls fail after this time",
    "collect.step_timeout_s": "from now on, calls of an environment fail after this time",
    "collect.retries": "from now on, failed calls and conversations are retried at most this many times",
    "collect.engine": "from now on, the same weights produce different completions",
    **dict.fromkeys(
        ("collect.num_slots", "collect.reply_after", "collect.live_conversations"),
        "from now on, completions may differ in the last bits of their log-probs",
    ),
}
"""Fields that may change, with a side effect."""

_SCHEDULE: Final = frozenset(
    {f"learn.{name}" for name in ("steps", "lr", "lr_schedule", "lr_decay_steps", "min_lr")}
    | {"learn.warmup_steps", "learn.warmup_ratio"}
)
"""Fields that the learning rate depends on."""

_LEARNING: Final = frozenset(
    {"learn.max_grad_norm", "learn.weight_decay", "loss.clip_low", "loss.clip_high", "loss.entropy_coeff"}
)
"""Fields that users change while they watch a run; they affect what is learned from then on."""


_OF_A_STEP: Final = _SCHEDULE | _LEARNING | {"learn.token_budget", "learn.layout", "learn.compile"}
"""Fields that may change and that a step on given trajectories depends on."""

_STAYS: Final = frozenset(
    {f"policy.{name}" for name in ("type", "alphabet", "hidden_size", "num_layers", "num_heads")}
    | {"policy.lora_rank", "policy.lora_targets", "learn.optimizer"}
)
"""Fields that determine the tensors of a checkpoint; a run that starts from a checkpoint must keep them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One field in which a recorded definition differs from the current one."""

    field: str
    """Its dotted path."""
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field} was {self.was!r} and is now {self.now!r}"

    def to_json(self) -> dict[str, Any]:
        """Return the change for `config.json`."""
        return {"field": self.field, "was": to_json(self.was), "is": to_json(self.now)}


_OTHER_EVALUATIONS: Final = frozenset(
    ("num_prompts", "group_size", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "prompts")
)
"""Fields of `evaluate` or of a set; after a change, evaluations are not compared with earlier ones."""


def _makes_others(field: str) -> bool:
    """Return whether evaluations are others after a change of this field.

    >>> [_makes_others(field) for field in ("evaluate.prompts.path", "evaluate.hard.top_p", "evaluate.every")]
    [True, True, False]
    """
    first, *rest = field.split(".")
    return first == "evaluate" and not _OTHER_EVALUATIONS.isdisjoint(rest[:2])


def is_allowed(field: str) -> bool:
    """Return whether a field may differ from the recorded definition when a run is continued.

    >>> is_allowed("learn.lr"), is_allowed("evaluate.every"), is_allowed("collect.group_size")
    (True, True, False)
    """
    is_listed = field in _SILENT or field in _WITH_CONSEQUENCE or field in _SCHEDULE or field in _LEARNING
    return is_listed or field.split(".")[0] == "evaluate"


def carries_over(field: str) -> bool:
    """Return whether a run may differ in a field from the one with whose checkpoint it begins.

    >>> carries_over("collect.group_size"), carries_over("policy.hidden_size")
    (True, False)
    """
    return field not in _STAYS


def definition_at(pipeline: Pipeline, history: Sequence[Mapping[str, Any]], step: int) -> Pipeline:
    """Return the definition with which a step was taken: what was changed for later steps has its earlier value.

    Only fields that a step on given trajectories depends on are looked at.

    Args:
        pipeline: the definition now.
        history: `changes` of `config.json`, oldest first.
        step: the step.
    """
    before: dict[str, Any] = {}
    for change in reversed(history):
        if change["from_step"] > step:
            before |= {field["field"]: field["was"] for field in change["fields"]}
    texts = {
        field: str(was).lower() if was is None or isinstance(was, bool) else str(was) for field, was in before.items()
    }
    return override_all(pipeline, [(field, text) for field, text in texts.items() if field in _OF_A_STEP])


def acts_differently(before: Pipeline, now: Pipeline, step: int) -> bool:
    """Return whether a step on given trajectories differs between two definitions of a run."""
    fields = {change.field for change in changes(to_json(before), now)} & (_OF_A_STEP - _SCHEDULE)
    return bool(fields) or before.learn.learning_rate(step) != now.learn.learning_rate(step)


def notice_of(change: Change, recorded: Mapping[str, Any], pipeline: Pipeline, step: int) -> str | None:
    """Return one line about a change: what changes, and from which step; None if it need not be reported."""
    if change.field in _SILENT:
        return None
    if change.field in _WITH_CONSEQUENCE:
        return f"{change}: {_WITH_CONSEQUENCE[change.field]}."
    if _makes_others(change.field):
        return f"{change}: evaluations from step {step} on differ from earlier ones; {APART}."
    if change.field not in _SCHEDULE:
        return f"{change}, from step {step} on."
    before = _learn(recorded.get("learn", {}))
    if change.field == "learn.steps" and (
        before.lr_decay_steps or (before.lr_schedule == "constant" and not before.warmup_ratio)
    ):
        return None  # no rate depends on it
    advice = ""
    if change.field == "learn.steps" and step > 1:
        advice = (
            " To keep the previous schedule, add --set "
            f"learn.lr_decay_steps={before.lr_decay_steps or before.steps + 1}"
        )
    last = f"the rate of step {step - 1} was {before.learning_rate(step - 1):.3g}; " if step > 1 else ""
    return (
        f"{change}: the learning rate of step {step} is {pipeline.learn.learning_rate(step):.3g} "
        f"({last}without the change, it would be {before.learning_rate(step):.3g}).{advice}"
    )


def changes(recorded: Mapping[str, Any], pipeline: Pipeline) -> list[Change]:
    """Return the fields in which a recorded definition differs from the current one."""
    return list(_differences("", recorded, pipeline))


def _learn(recorded: Mapping[str, Any]) -> Learn:
    """Return the recorded optimizer settings that this version knows."""
    field_names = {item.name for item in dataclasses.fields(Learn)}
    return Learn(**{name: value for name, value in recorded.items() if name in field_names})


def _differences(prefix: str, old: Any, config: Any) -> Iterator[Change]:
    new = to_json(config)
    if isinstance(old, dict) and isinstance(new, dict) and dataclasses.is_dataclass(config):
        defaults = {item.name: _default(item) for item in dataclasses.fields(config)}
        for name in sorted({**old, **new}):
            # A field that the record lacks is newer than the run, which ran with its default.
            before = old.get(name, defaults.get(name))
            after = getattr(config, name) if name in defaults else new.get(name)
            yield from _differences(f"{prefix}.{name}" if prefix else name, before, after)
    elif isinstance(old, dict) and isinstance(new, dict) and old.get("type") == new.get("type") is not None:
        for name in sorted({**old, **new}):  # an object of a custom class
            yield from _differences(f"{prefix}.{name}" if prefix else name, old.get(name), new.get(name))
    elif config and _has_groups(config) and isinstance(old, dict):
        for name in sorted({**old, **config}):  # several groups of fields, each by its name
            yield from _differences(f"{prefix}.{name}", old.get(name), config.get(name))
    elif isinstance(config, tuple) and len(old or ()) == len(config) and all(map(dataclasses.is_dataclass, config)):
        for place, (before, after) in enumerate(zip(old, config, strict=True)):
            yield from _differences(f"{prefix}.{place}", before, after)
    elif old != new:
        yield Change(field=prefix, was=old, now=new)


def _has_groups(config: Any) -> bool:
    """Return whether a value is a dict of groups of fields."""
    return isinstance(config, dict) and all(map(dataclasses.is_dataclass, cast("dict[str, Any]", config).values()))


def _default(item: dataclasses.Field[Any]) -> Any:
    """Return the default of a field in its recorded form, or None if it has no default."""
    if item.default_factory is not dataclasses.MISSING:
        return to_json(item.default_factory())
    return None if item.default is dataclasses.MISSING else to_json(item.default)
