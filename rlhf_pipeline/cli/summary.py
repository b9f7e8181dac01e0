"""The last lines of a run: the result, and the next commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.errors import count, typed
from rlhf_pipeline.report.formatting import duration, number
from rlhf_pipeline.run.address import below
from rlhf_pipeline.run.checkpoint import step_of
from rlhf_pipeline.run.choice_record import recorded_choice
from rlhf_pipeline.run.events import CollectorFinished, RunFinished
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.run import Run


def finish(finished: RunFinished | CollectorFinished, request: Run, view: RunView) -> None:
    """Write the report, and print the result of the run and the next commands; of a collector, only its own."""
    if isinstance(finished, CollectorFinished):
        view.echo("\n".join(_collected(finished, request)))
        return
    from rlhf_pipeline.report.one_file import write_report
    from rlhf_pipeline.report.show import before_and_after

    run = RunFolder.open(finished.run_dir)
    if request.pipeline.replay is not None:
        view.echo(replay_sentence(finished, run, resumed=request.resume))
    else:
        view.echo(result_sentence(finished, resumed=request.resume))
    if finished.reason == "interrupted" and not run.metrics:  # there may be no store yet
        view.echo(f"next:\n  {request.again}\n      resume the run")
        return
    if request.pipeline.replay is None:
        for line in before_and_after(run, shutil.get_terminal_size((110, 24)).columns):
            view.echo(line)
    written = write_report(run)
    view.echo(f"written: {written}")
    for line in _trained(run):
        view.echo(line)
    view.echo("next:")
    for command, meaning in next_commands(finished, request):
        view.echo(f"  {command:<60}  {meaning}" if len(command) < 60 else f"  {command}\n      {meaning}")


def _collected(event: CollectorFinished, request: Run) -> Iterator[str]:
    why = {"finished": "the run has ended", "interrupted": "stopped"}[event.reason]
    yield (
        f"{event.collector}: {why}; {count(event.num_rollouts, 'rollout')} stored, "
        f"{count(event.num_trajectories, 'trajectory')}"
    )
    folder = typed(event.run_dir)
    yield "next:"
    if event.reason == "finished":
        yield f"  rlhf-pipeline learn --run {folder} --steps N    continue learning; then start collectors"
    else:
        yield f"  {request.again}    continue collecting"
    yield f"  rlhf-pipeline inspect {folder}    count the stored trajectories"


def _trained(run: RunFolder) -> Iterator[str]:
    """Yield where the weights of the newest checkpoint are, if one was saved after a step."""
    saved = [path for path in run.saved() if step_of(path)]
    if not saved:
        return
    what = "adapters" if run.config.pipeline.get("policy", {}).get("lora_rank") else "model"
    where = below(run.address, f"{run.checkpoints.name}/{saved[-1].name}")
    yield f"the trained {what}: {where}  (see docs/use_the_model.md)"


def result_sentence(finished: RunFinished, *, resumed: bool = False) -> str:
    """Return the result of a run, for example `reward 0.10 -> 0.98 in 180 steps (21 s), 23,040 trajectories stored`."""
    steps = (
        f"{count(finished.steps, 'step')} ({duration(finished.seconds)}{' since it was resumed' if resumed else ''})"
    )
    stored = f"{count(finished.num_trajectories, 'trajectory')} stored"
    if finished.first_reward is None:
        sentence = f"no rollout was finished; {count(finished.steps, 'step')}, {stored}"
    else:
        sentence = f"reward {number(finished.first_reward)} -> {number(finished.last_reward)} in {steps}, {stored}"
    why = {"target": "target reached: ", "steps": "", "interrupted": "stopped and saved: "}[finished.reason]
    return why + sentence


def replay_sentence(finished: RunFinished, run: RunFolder, *, resumed: bool = False) -> str:
    """Return the result of a replay: `50 steps (21 s) on 3,824 trajectories of 1 store; 0.84 uses of each`."""
    if finished.reason == "interrupted" and not run.metrics:
        return f"stopped while gathering: {count(finished.num_trajectories, 'trajectory')} are in the store"
    since = " since it was resumed" if resumed else ""
    why = "stopped and saved: " if finished.reason == "interrupted" else ""
    steps = f"{count(finished.steps, 'step')} ({duration(finished.seconds)}{since})"
    stores = len((recorded_choice(run) or {}).get("sources", ()))
    replayed = f"{count(finished.num_trajectories, 'trajectory')} of {count(stores, 'store')}"
    uses = sum(len(row["row_ids"]) for row in run.ledger) / max(finished.num_trajectories, 1)
    return f"{why}{steps} on {replayed}; {uses:.2f} uses of each"


def next_commands(finished: RunFinished, request: Run) -> list[tuple[str, str]]:
    """Return useful next commands, each with its meaning."""
    folder = typed(finished.run_dir)
    more = {
        "interrupted": (f"{request.again}", "resume the run"),
        "steps": (f"{request.again} --steps {2 * finished.steps}", "continue for the same number of steps"),
        "target": (f"{request.again} --set learn.stop_at_reward=none", "continue beyond the target"),
    }
    looks = [(f"rlhf-pipeline view {folder}", "view it in a browser")] if finished.num_trajectories else []
    looks += [(f"rlhf-pipeline inspect {folder}", "count the trajectories; --grade grades them again")]
    if finished.num_trajectories:
        looks.append((f"rlhf-pipeline show {folder}", "show the newest trajectory token by token"))
    again = more[finished.reason]
    replay, early = request.pipeline.replay, finished.steps < request.pipeline.learn.steps
    if finished.reason == "steps" and replay is not None and (replay.recorded_order or early):
        return looks  # there is nothing left for more steps to learn from
    return [again, *looks] if finished.reason == "interrupted" else [*looks, again]
