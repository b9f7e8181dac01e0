"""Evaluation on prompts that are never learned from.

The completions of an evaluation are rows of a store of their own, `evaluations/DIGEST` in the run folder, marked by the
column `evaluation`. They are not in the run's store because its rows are numbered: the ledger, the watermark of each
step and the ring of `buffer.max_trajectories` count them, so a run with evaluations would name other rows, and evict
others, than the same run without. The digest is that of what is evaluated; other prompts or another temperature begin
another store, see `run.evaluation_rows`.

An evaluation is one rollout of a `Collector`, number `step`, in one commit: one that a kill interrupted is done again
token for token, and one that is stored is read and not sampled again. Beside a learner, a collector does it; the
learner reads the rows, see `run.processes.remote_evaluations`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Final

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.buffer.storage import TrajectoryStorage
from rlhf_pipeline.buffer.trajectory_schema import EVALUATION, FAILURES, TURNS, named_reward
from rlhf_pipeline.collectors.collector import Collector
from rlhf_pipeline.config import Evaluate, Pipeline
from rlhf_pipeline.data.prompts import Prompt, PromptSource, prompt_at, template_options, through_template
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.address import is_url
from rlhf_pipeline.run.bound_rewards import bound_rewards
from rlhf_pipeline.run.engines import HandOver
from rlhf_pipeline.run.evaluation_rows import Figures, evaluation_figures, evaluation_store, stored_evaluations
from rlhf_pipeline.run.events import EvaluationDone, EventHandler
from rlhf_pipeline.run.folder import RunFolder, tell
from rlhf_pipeline.run.prompt_lengths import check_prompts, fitting
from rlhf_pipeline.run.signals import StopRequest
from trajectory_store import TrajectoryStore

_PROMPT_SEED: Final = 0
"""Seeds the choice of prompts, so that runs of other seeds are evaluated on the same ones."""
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
        source = fitting(evaluate.prompts, policy)
        return cls(source=source, count=_num_prompts(evaluate, source))

    @property
    def as_chat(self) -> bool:
        """As the source says."""
        return through_template(self.source)

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """As the source says."""
        return template_options(self.source)

    def prompt(self, cursor: int, seed: int) -> Prompt:
        """Return prompt `cursor % count`."""
        del seed
        return prompt_at(self.source, cursor % self.count, _PROMPT_SEED)


def _num_prompts(evaluate: Evaluate, source: PromptSource) -> int:
    """Return how many prompts are evaluated: `num_prompts`, or all of a source that has fewer."""
    whole: Any = getattr(source, "all_prompts", None)
    size: Any = getattr(source, "__len__", None)
    known = size() if size is not None else len(whole()) if whole is not None else evaluate.num_prompts
    return min(evaluate.num_prompts, known)


def evaluation_storage(run: RunFolder, pipeline: Pipeline, evaluate: Evaluate) -> TrajectoryStorage:
    """Open the store of a run's evaluations for appending; it is made if absent."""
    path = evaluation_store(run, pipeline, evaluate)
    return TrajectoryStorage(
        path if isinstance(path, str) else str(path),
        backend="zarr" if is_url(path) else pipeline.buffer.backend,
        durability=pipeline.buffer.durability,
        extra=[
            *FAILURES,
            EVALUATION,
            *([] if pipeline.environment is None else [TURNS]),
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
    evaluate = pipeline.evaluate
    if evaluate is None:
        yield None
        return
    prompts = FirstPrompts.of(pipeline, evaluate, policy, on_event)
    with closing(evaluation_storage(run, pipeline, evaluate)) as storage:
        config = dataclasses.replace(
            pipeline.collect,
            prompts_per_rollout=prompts.count,
            group_size=evaluate.group_size,
            dynamic=1,
            max_new_tokens=evaluate.max_new_tokens or pipeline.collect.max_new_tokens,
            **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} if not evaluate.temperature else {}),
        )
        collector = Collector(
            policy=policy,
            prompts=prompts,
            reward=bound_rewards(pipeline),
            buffer=TrajectoryReplayBuffer(storage=storage, seed=seed),
            config=config,
            seed=seed + _STREAMS,
            hand_over=hand_over,
            temperature=evaluate.temperature,
            marks={EVALUATION.name: True},
            environment=pipeline.environment,
        )
        yield Evaluator(evaluate, collector, on_event)


class Evaluations(ABC):
    """The evaluations of a run, and which weights are the best."""

    def __init__(self, evaluate: Evaluate, store: TrajectoryStore, *, size: int, on_event: EventHandler) -> None:
        self.store = store
        self._evaluate = evaluate
        self._size = size
        self._on_event = on_event
        self._means: dict[int, float | None] = {}
        self._num_rows = 0
        self._new()

    def is_due(self, step: int) -> bool:
        """Return whether the weights of a step are to be evaluated."""
        return self._evaluate.at_start if step == 0 else step % self._evaluate.every == 0

    @abstractmethod
    def after(self, step: int, stop: StopRequest) -> Figures:
        """Return the figures for the line of a step that has just been taken, or of 0 at the start."""

    def kept(self, step: int) -> set[int]:
        """Return the steps up to this one whose checkpoints are kept beside the newest; see `Evaluate.keep_best`."""
        best = self._best(step)
        return set() if best is None else {best}

    def wait(self, stop: StopRequest) -> bool:
        """Wait until every evaluation is done; return False if a signal asked to stop before that."""
        return True

    def flush(self) -> None:
        """Wait until every row is on the disk."""
        self.store.flush()

    def _best(self, step: int) -> int | None:
        """Return the best evaluated step up to this one, if its checkpoint is kept."""
        known = [(-mean, at) for at, mean in self._means.items() if at <= step and mean is not None]
        return min(known)[1] if known and self._evaluate.keep_best else None

    def _new(self) -> list[dict[str, Any]]:
        """Return step and figures of the evaluations that have been stored since the last call."""
        before, self._num_rows = self._num_rows, len(self.store)
        if before == self._num_rows:  # asked at every step: not to read the rows of all evaluations each time
            return []
        found = stored_evaluations(self.store, self._evaluate.success_at, size=self._size, besides=self._means)
        self._means |= {one["step"]: one["evaluation/reward"] for one in found}
        return found

    def _tell(self, step: int, figures: Figures, *, newest: int) -> None:
        """Report an evaluation; it may be the best of those up to the newest step."""
        best = self._best(newest) == step
        self._on_event(EvaluationDone(step=step, best=best, figures=figures))


class Evaluator(Evaluations):
    """Evaluates the weights of steps; made by `open_evaluator`."""

    def __init__(self, evaluate: Evaluate, collector: Collector, on_event: EventHandler) -> None:
        size = collector.config.rollout_size
        super().__init__(evaluate, collector.buffer.store, size=size, on_event=on_event)
        self._collector = collector

    def after(self, step: int, stop: StopRequest) -> Figures:
        """Evaluate the policy's weights if that is due."""
        return self.evaluate(step, stop) if self.is_due(step) else {}

    def stored(self) -> Container[int]:
        """Return the steps whose evaluations are stored by now, by any process."""
        self._collector.buffer.refresh()
        self._new()
        return self._means

    def evaluate(self, step: int, stop: StopRequest, *, digests: Mapping[int, int] | None = None) -> Figures:
        """Evaluate the policy's weights, or read what was stored of them."""
        done = self._collector.collect(
            step,
            policy_version=step,
            digests=digests,
            stop=lambda: bool(stop),
            say=lambda sentence: tell(self._on_event, sentence),
        )
        size = self._collector.config.prompts_per_rollout
        rows = self._collector.stored.rows(step * size, (step + 1) * size - 1)
        figures = evaluation_figures(self.store, rows, self._evaluate.success_at)
        self._means[step] = figures["evaluation/reward"]
        figures["evaluation/seconds"] = done.seconds
        self._tell(step, figures, newest=step if digests is None else max(self._means))
        return figures
