"""Evaluation on prompts that are never used for training.

The completions of an evaluation are rows of a separate store, `evaluations/DIGEST` in the run folder, or
`evaluations/NAME-DIGEST` for a set of prompts with a name, marked by the column `evaluation`. They are not in the run's
store because its rows are numbered: the ledger, the watermark of each step and the ring of `buffer.max_trajectories`
count them, so a run with evaluations would name other rows, and evict others, than the same run without. The digest is
that of what is evaluated; other prompts or another temperature begin another store, see `run.evaluation_rows`.

An evaluation is one rollout of a `Collector`, number `step`, in one commit: one that a kill interrupted is done again
token for token, and one that is stored is read and not sampled again. Beside a learner, a collector does it; the
learner reads the rows, see `run.processes.remote_evaluations`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import EVALUATION, FAILURES, SUPPORT, TURNS, named_reward
from rlhf_pipeline.collectors.collector import Collector
from rlhf_pipeline.config import EVALUATION_FIGURES, Evaluate, Pipeline, deciding_set
from rlhf_pipeline.data.prompts import Prompt, PromptSource, prompt_at, template_options, through_template
from rlhf_pipeline.errors import DefinitionError, did_you_mean
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.bound_rewards import bound_rewards
from rlhf_pipeline.run.engines import HandOver
from rlhf_pipeline.run.evaluation_rows import (
    Figures,
    evaluation_figures,
    evaluation_store,
    figure_for_best,
    names_in,
    of_set,
    stored_evaluations,
)
from rlhf_pipeline.run.events import EvaluationDone, EventHandler, notify
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.prompt_lengths import check_prompts, fitting
from rlhf_pipeline.run.signals import StopRequest
from trajectory_store import TrajectoryStore

_PROMPT_SEED: Final = 0
"""Seeds the choice of prompts, so that runs with different seeds are evaluated on the same prompts."""
_STREAMS: Final = 0x5EED
"""Added to the run's seed for the random numbers of an evaluation."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FirstPrompts:
    """The first prompts of a source, again and again."""

    source: PromptSource
    count: int

    @classmethod
    def of(cls, pipeline: Pipeline, evaluate: Evaluate, policy: TokenPolicy, on_event: EventHandler) -> FirstPrompts:
        """Return the prompts of an evaluation, checked against what the model can read."""
        check_prompts(dataclasses.replace(pipeline, prompts=evaluate.prompts), policy, _PROMPT_SEED, on_event)
        source = fitting(evaluate.prompts, policy, prefill=pipeline.collect.prefill)
        return cls(source=source, count=_num_prompts(evaluate, source))

    @property
    def as_chat(self) -> bool:
        """The value of the source."""
        return through_template(self.source)

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """The value of the source."""
        return template_options(self.source)

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt `cursor % count`."""
        del seed
        return prompt_at(self.source, cursor % self.count, _PROMPT_SEED)


def _num_prompts(evaluate: Evaluate, source: PromptSource) -> int:
    """Return how many prompts are evaluated: `num_prompts`, or all of a source that has fewer."""
    whole: Any = getattr(source, "all_prompts", None)
    size: Any = getattr(source, "__len__", None)
    available = size() if size is not None else len(whole()) if whole is not None else evaluate.num_prompts
    return min(evaluate.num_prompts, available)


def evaluation_storage(run: RunFolder, pipeline: Pipeline, name: str) -> TrajectoryStorage:
    """Open the store of the evaluations of one of a run's sets for appending; it is made if absent."""
    path = evaluation_store(run, pipeline, pipeline.evaluations[name], name)
    return TrajectoryStorage(
        path if isinstance(path, str) else str(path),
        backend=run.place.backend(pipeline.buffer.backend),
        durability=pipeline.buffer.durability,
        extra=[
            *FAILURES,
            EVALUATION,
            *([] if pipeline.environment is None else [TURNS]),
            *([SUPPORT] if pipeline.evaluations[name].sampling(pipeline.collect).is_truncated else []),
            *map(named_reward, pipeline.reward_names),
        ],
    )


@contextmanager
def open_evaluator(
    pipeline: Pipeline,
    policy: TokenPolicy,
    *,
    run: RunFolder,
    seed: int,
    on_event: EventHandler,
    hand_over: HandOver | None = None,
) -> Iterator[Evaluator | None]:
    """Open what evaluates a run's policy, or None if the definition does not ask for it."""
    if pipeline.evaluate is None:
        yield None
        return
    bound = bound_rewards(pipeline)
    with ExitStack() as resources:
        sets: list[EvaluationSet] = []
        collectors: list[Collector] = []
        for name, evaluate in pipeline.evaluations.items():
            prompts = FirstPrompts.of(pipeline, evaluate, policy, on_event)
            storage = resources.enter_context(closing(evaluation_storage(run, pipeline, name)))
            config = dataclasses.replace(evaluate.sampling(pipeline.collect), prompts_per_rollout=prompts.count)
            sets.append(EvaluationSet(name, evaluate, storage.store, size=config.rollout_size))
            collectors.append(
                Collector(
                    policy=policy,
                    prompts=prompts,
                    reward=bound,
                    buffer=TrajectoryReplayBuffer(storage=storage, seed=seed),
                    config=config,
                    seed=seed + _STREAMS,
                    hand_over=hand_over,
                    temperature=evaluate.temperature,
                    marks={EVALUATION.name: True},
                    environment=pipeline.environment,
                    same_tasks=prompts.count,
                )
            )
        yield Evaluator(sets, collectors, on_event)


class EvaluationSet:
    """The evaluations on one set of prompts, as far as stored.

    Attributes:
        name: of the set; empty for a definition's only one.
        evaluate: how it is evaluated.
        store: has the rows.
        size: rows of one evaluation.
        values: the figure for the best weights, by step; None where there is none.
    """

    def __init__(self, name: str, evaluate: Evaluate, store: TrajectoryStore, *, size: int) -> None:
        self.name, self.evaluate, self.store, self.size = name, evaluate, store, size
        self.values: dict[int, float | None] = {}
        self._num_rows = 0

    def is_due(self, step: int) -> bool:
        """Return whether the weights of a step are to be evaluated."""
        return self.evaluate.at_start if step == 0 else step % self.evaluate.every == 0

    def new(self) -> list[tuple[int, Figures]]:
        """Return step and figures of the evaluations that have been stored since the last call."""
        before, self._num_rows = self._num_rows, len(self.store)
        if before == self._num_rows:  # asked at every step: not to read the rows of all evaluations each time
            return []
        stored = stored_evaluations(self.store, self.evaluate, size=self.size, besides=self.values)
        return [(step, self.note(step, figures)) for figures in stored for step in (figures.pop("step"),)]

    def note(self, step: int, figures: Figures) -> Figures:
        """Note the figures of a step, and return them."""
        self.values[step] = figure_for_best(figures, self.evaluate.best)
        return figures

    def best(self, step: int) -> int | None:
        """Return the best evaluated step up to this one, of equal ones the earliest."""
        ranked = [(-value, at) for at, value in self.values.items() if at <= step and value is not None]
        return min(ranked)[1] if ranked else None


class Evaluations(ABC):
    """The evaluations of a run, on one set of prompts or several, and which weights are the best."""

    def __init__(self, sets: Sequence[EvaluationSet], on_event: EventHandler) -> None:
        self.sets = sets
        self._on_event = on_event
        by_name = {evaluation_set.name: evaluation_set for evaluation_set in sets}
        decides = deciding_set({name: evaluation_set.evaluate for name, evaluation_set in by_name.items()})
        self._deciding = None if decides is None else by_name[decides]
        """The set by which the best weights are chosen; None if none are kept."""
        for evaluation_set in sets:
            evaluation_set.new()

    @property
    def store(self) -> TrajectoryStore:
        """The store of the first set."""
        return self.sets[0].store

    def is_due(self, step: int) -> bool:
        """Return whether the weights of a step are to be evaluated on any set."""
        return any(evaluation_set.is_due(step) for evaluation_set in self.sets)

    def has(self, step: int) -> bool:
        """Return whether every evaluation that is due at a step is stored, as far as was looked."""
        return all(step in evaluation_set.values for evaluation_set in self.sets if evaluation_set.is_due(step))

    @abstractmethod
    def after(self, step: int, stop: StopRequest) -> Figures:
        """Return the figures for the line of a step that has just been taken, or of 0 at the start."""

    def retained_steps(self, step: int) -> set[int]:
        """Return the steps up to this one whose checkpoints are kept beside the newest; see `Evaluate.keep_best`."""
        best = None if self._deciding is None else self._deciding.best(step)
        return set() if best is None else {best}

    def wait(self, stop: StopRequest) -> bool:
        """Wait until every evaluation is done; return False if a signal asked to stop before that."""
        return True

    def sync(self) -> None:
        """Wait until every row that was read or written here is on the disk."""
        for evaluation_set in self.sets:
            evaluation_set.store.sync()

    def _report(self, evaluation_set: EvaluationSet, step: int, figures: Figures, *, newest: int) -> None:
        """Report an evaluation; it may be the best of those up to the newest step."""
        best = evaluation_set is self._deciding and evaluation_set.best(newest) == step
        self._on_event(EvaluationDone(name=evaluation_set.name, step=step, best=best, figures=figures))
        for field, name in (("success", evaluation_set.evaluate.success), ("best", evaluation_set.evaluate.best)):
            is_figure = name in EVALUATION_FIGURES or f"evaluation/{name}" in figures
            if name is None or is_figure or f"evaluation/reward/{name}" in figures:
                continue
            path = f"evaluate.{f'{evaluation_set.name}.' if evaluation_set.name else ''}{field}"
            reward_names = names_in(evaluation_set.store)
            if not reward_names and figures.get("evaluation/reward") is not None:
                raise DefinitionError(
                    f"{path} is {name!r}, but the evaluation of step {step} has neither a named reward nor a "
                    f"component. Name the reward function with Reward(f, name={name!r}), or continue without this "
                    f"setting: --resume --set {path}=none"
                )
            notify(
                self._on_event,
                f"{path} is {name!r}, but no completion of the evaluation of step {step} has a reward or component "
                "with that name; the names are: "
                f"{', '.join(reward_names) or 'none'}.{did_you_mean(name, reward_names)}",
            )


class Evaluator(Evaluations):
    """Evaluates the weights of steps; made by `open_evaluator`."""

    def __init__(self, sets: Sequence[EvaluationSet], collectors: Sequence[Collector], on_event: EventHandler) -> None:
        super().__init__(sets, on_event)
        self._collectors = collectors

    def after(self, step: int, stop: StopRequest) -> Figures:
        """Evaluate the policy's weights on the sets for which that is due."""
        return self.evaluate(step, stop, due=True) if self.is_due(step) else {}

    def stored(self) -> Container[int]:
        """Return the steps all of whose evaluations are stored by now, by any process."""
        for evaluation_set, collector in zip(self.sets, self._collectors, strict=True):
            collector.buffer.refresh()
            evaluation_set.new()
        return {step for evaluation_set in self.sets for step in evaluation_set.values if self.has(step)}

    def evaluate(
        self, step: int, stop: StopRequest, *, digests: Mapping[int, int] | None = None, due: bool = False
    ) -> Figures:
        """Evaluate the policy's weights, or read what was stored of them; with `due`, on the sets that are due."""
        all_figures: Figures = {}
        for evaluation_set, collector in zip(self.sets, self._collectors, strict=True):
            if due and not evaluation_set.is_due(step):
                continue
            done = collector.collect(
                step,
                policy_version=step,
                digests=digests,
                stop=lambda: bool(stop),
                say=lambda sentence: notify(self._on_event, sentence),
            )
            size = collector.config.prompts_per_rollout
            rows = collector.stored.rows(step * size, (step + 1) * size - 1)
            figures = evaluation_set.note(step, evaluation_figures(evaluation_set.store, rows, evaluation_set.evaluate))
            figures["evaluation/seconds"] = done.seconds
            self._report(evaluation_set, step, figures, newest=step if digests is None else max(evaluation_set.values))
            all_figures |= of_set(evaluation_set.name, figures)
        return all_figures
