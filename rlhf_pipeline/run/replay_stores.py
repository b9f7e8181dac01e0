"""A run that learns only from stores: gather, then take steps; its folder is like that of any other run."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict

from rlhf_pipeline.buffer.buffer import TrajectoryReplayBuffer
from rlhf_pipeline.config import Replay
from rlhf_pipeline.policies.token_policy import TokenPolicy
from rlhf_pipeline.run.address import address_of
from rlhf_pipeline.run.build import build_learner, build_policy, open_storage
from rlhf_pipeline.run.choice_record import gathered_counts, record_choice, recorded_choice
from rlhf_pipeline.run.copy_rows import GatherCounts, Gatherer, gather_schema
from rlhf_pipeline.run.evaluation import open_evaluator
from rlhf_pipeline.run.events import EventHandler, RunFinished, notify
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.ledger import Ledger
from rlhf_pipeline.run.loop import Loop
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.selection import Choice, Limits, choose
from rlhf_pipeline.run.signals import StopRequest, stop_on_signals
from rlhf_pipeline.run.sources import ledger_to_follow, stored_source
from rlhf_pipeline.run.temperatures import check_known, replayed_at


def replay_stores(job: Run, replay: Replay, *, on_event: EventHandler) -> RunFinished:
    """Learn from the stores that a definition names, to its end or until a signal.

    First the chosen trajectories are copied into the run's own store; those that lack log-probs or an advantage go
    through the write path. Then every step learns from a batch of them, which is a function of the gathered store,
    the seed and the step. A resumed run continues gathering where it stopped, or continues from the newest checkpoint.
    The choice of the first start is kept, even if stores have grown since.
    """
    started, folder, pipeline, seed = time.perf_counter(), RunFolder(job.run_dir), job.pipeline, job.seed
    policy = build_policy(pipeline, seed=seed, device=job.device)
    # Scored by the code path of the update.
    policy.set_scoring(layout=pipeline.learn.layout, compiled=pipeline.learn.compile)
    limits = limits_of(policy)
    choice = Choice.load(folder) or choose(replay, limits)
    if Choice.load(folder) is None:
        check_known(pipeline, job.overrides, choice)
    heat = replayed_at(folder, choice)
    if heat is not None and heat != (policy.temperature or 1.0):
        policy.temperature = heat
    schema = None if gathered_counts(folder) is not None else gather_schema(choice)
    with job.begun(folder, on_event) as heartbeat:
        if policy.temperature != pipeline.collect.temperature:
            notify(
                on_event,
                f"the trajectories were sampled at temperature {policy.temperature:g}, and are scored at this "
                f"temperature, not at collect.temperature={pipeline.collect.temperature:g}.",
            )
        if Choice.load(folder) is None:
            followed = ledger_to_follow(address_of(choice.sources[0].path)) if replay.recorded_order else None
            if followed is not None:
                folder.write(folder.recorded_ledger, followed)
            choice.save(folder)
        # Everything chosen stays: `buffer.max_trajectories` limits only collected trajectories.
        storage = open_storage(folder, pipeline, max_size=None, schema=schema)
        with closing(storage), stop_on_signals() as stop:
            gatherer = Gatherer(pipeline, policy, choice, storage.store, limits=limits, on_event=on_event)
            if gathered_counts(folder) is not None or _gather(gatherer, folder, stop):
                storage.refresh()
                buffer = TrajectoryReplayBuffer(storage=storage, seed=seed)
                ledger = Ledger(folder.rows(folder.ledger_file), metrics=folder.metrics)
                learner = build_learner(pipeline, policy, buffer, ledger=ledger, seed=seed)
                source = stored_source(pipeline, replay, learner, folder)
                with open_evaluator(pipeline, policy, run=folder, seed=seed, on_event=on_event) as evaluator:
                    loop = Loop(
                        job,
                        folder,
                        learner,
                        source,
                        stop=stop,
                        on_event=on_event,
                        after=heartbeat.beat_step,
                        evaluator=evaluator,
                        started=started,
                    )
                    loop.restore()
                    finished = loop.finished(loop.run(), len(storage.store))
            else:
                finished = RunFinished(
                    run_dir=job.run_dir,
                    reason="interrupted",
                    steps=0,
                    seconds=time.perf_counter() - started,
                    first_reward=None,
                    last_reward=None,
                    num_trajectories=len(storage.store),
                )
    on_event(finished)
    return finished


def limits_of(policy: TokenPolicy) -> Limits:
    """Return the limits of what a policy can read."""
    return Limits(vocabulary=int(policy.head_weight.shape[0]), positions=policy.max_positions)


def _gather(gatherer: Gatherer, run: RunFolder, stop: StopRequest) -> bool:
    """Gather what is missing; return False if a signal stopped it before the end."""
    counts = gatherer.run(lambda: bool(stop))
    if counts is None:
        return False
    gatherer.target.flush()
    record_choice(run, {**(recorded_choice(run) or {}), "gathered": asdict(counts)})
    notify(gatherer.on_event, _what_was_gathered(gatherer.choice, counts), level="info")
    return True


def _what_was_gathered(choice: Choice, counts: GatherCounts) -> str:
    num = len(choice.sources)
    sentences = [f"gathered {counts.trajectories:,} trajectories of {num} store{'s' if num > 1 else ''}"]
    ungraded = sum(source.num_ungraded for source in choice.sources)
    damaged = sum(source.num_damaged for source in choice.sources)
    repeated = sum(source.num_repeated for source in choice.sources)
    for figure, what in (
        (counts.behaviour_scored, "received behaviour log-probs from the initial policy"),
        (counts.reference_scored, "received reference log-probs"),
        (counts.advantages, "received an advantage"),
        (counts.dropped, "in groups without spread were dropped"),
        (ungraded, "have no reward and were skipped"),
        (damaged, "are damaged and were skipped"),
        (repeated, "are superseded by later rows and were skipped"),
    ):
        if figure:
            sentences.append(f"{figure:,} {what}")
    return "; ".join(sentences)
