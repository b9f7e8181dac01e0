"""`rlhf-pipeline replay`: learn from stores; or repeat a run's steps from a checkpoint and compare."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_pipeline.cli.output import echo
from rlhf_pipeline.cli.parser import (
    above_zero,
    add_filter,
    add_overrides,
    add_skip_damaged,
    add_steps,
    add_trust,
    natural,
    positive,
)
from rlhf_pipeline.errors import DefinitionError, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlhf_pipeline.cli.progress import RunView
    from rlhf_pipeline.report.diff_steps import StepsDifference
    from rlhf_pipeline.run.address import Address
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.run import Run

HELP = "learn from stored trajectories only, or repeat the steps of a run and compare the results"
DETAILS = """\
Learns from the trajectories of stores and runs, without sampling. The trajectories are copied into a new run
folder, which contains all the files of a run. Missing log-probs and advantages are computed first.

A single RUN is replayed with its own definition, seed and order of trajectories, and the results are compared with the
recorded results. On a CPU, loss, reward, gradient norm and weights are bitwise equal. For a STORE, the default
definition is `offline_replay`. Filters have the same syntax as for `export`.

examples:
  rlhf-pipeline replay runs/copy_digits                     reproduce the learning curve from the store
  rlhf-pipeline replay runs/solutions --set policy.path=model --epochs 2
  rlhf-pipeline replay runs/a runs/b --weight 3 --weight 1 --filter 'reward>=0.5' --steps 200
  rlhf-pipeline replay runs/copy_digits --from-step 95      repeat step 95 and later steps from a checkpoint
                                                            and the ledger; the run is not modified

The exit code is 1 if results that should be the same differ."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "paths", nargs="*", metavar="STORE|RUN", help="the stores or runs to learn from; they are not modified"
    )
    command.add_argument(
        "--definition",
        metavar="NAME|FILE.py[:function]",
        help="the definition (default: the definition of the first RUN, otherwise offline_replay)",
    )
    command.add_argument("--out", metavar="DIR", help="the run folder (default: runs/NAME-replay)")
    add_steps(command)
    command.add_argument(
        "--epochs", type=above_zero, metavar="E", help="stop when the average number of uses per trajectory reaches E"
    )
    command.add_argument(
        "--weight",
        dest="weights",
        type=above_zero,
        action="append",
        default=[],
        metavar="W",
        help=(
            "relative share of each batch that comes from a store; specify one W per STORE, in the order of the stores"
        ),
    )
    add_filter(command)
    add_skip_damaged(command)
    command.add_argument(
        "--seed", type=natural, metavar="N", help="seed for weights and batches (default: the run's seed)"
    )
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: the run's device, or cpu)")
    command.add_argument("--resume", action="store_true", help="resume a stopped replay")
    add_overrides(command)
    add_trust(command)
    command.add_argument(
        "--from-step",
        type=positive,
        metavar="K",
        help="repeat step K and later steps of one RUN from a checkpoint, and compare the results with the recorded "
        "ones; the run is not modified",
    )


def execute(args: argparse.Namespace) -> int:
    """Replay; return 1 if a step differs from its record."""
    if args.from_step is None:
        from rlhf_pipeline.cli.process import conduct
        from rlhf_pipeline.cli.request import requested_run

        run = requested_run(args)
        return conduct(run, "starting", args=args, then=lambda view: compare(run, view))
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import not_found

    _check_rerun(args)
    folder = address_of(args.paths[0])
    if not is_run(folder):
        raise not_found(folder)
    return replay_run(folder, from_step=args.from_step, num_steps=args.steps, device=args.device, trust=args.trust)


def _check_rerun(args: argparse.Namespace) -> None:
    """Reject options that conflict with `--from-step`, which takes everything from the run."""
    if len(args.paths) != 1:
        raise DefinitionError("--from-step repeats the steps of one run; specify exactly one run.")
    values = {"--definition": args.definition, "--out": args.out, "--epochs": args.epochs, "--weight": args.weights}
    values |= {"--filter": args.filters, "--set": args.overrides, "--seed": args.seed, "--resume": args.resume}
    typed = [name for name, value in values.items() if value not in (None, False, [])]
    if typed:
        raise DefinitionError(
            f"{typed[0]} cannot be combined with --from-step, which repeats the recorded steps. Omit one of "
            "the two options."
        )


def replay_run(folder: Address, *, from_step: int, num_steps: int | None, device: str | None, trust: bool) -> int:
    """Print each step's recorded and recomputed loss; return 1 if any differs."""
    from rlhf_pipeline.cli.torchrun import import_torch
    from rlhf_pipeline.run.continuation import check_unchanged
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.preflight import check_device
    from rlhf_pipeline.run.saved_inputs import definition_of, with_copied_inputs

    run = RunFolder.open(folder)
    config = run.config
    definition = definition_of(run, trust=trust, moved="put it back")
    pipeline = definition.pipeline(with_copied_inputs(run, config.overrides))
    check_unchanged(run, pipeline, config.seed, inputs=False)  # nothing is sampled
    device = device or config.device
    check_device(device)
    import_torch(device)
    from rlhf_pipeline.run import rerun

    plan = rerun.plan_rerun(folder, from_step=from_step, num_steps=num_steps)
    before = plan.first - 1 - plan.start
    lead = f", after repeating {count(before, 'step')} before it" if before else ""
    echo(f"{folder}: steps {plan.first} to {plan.last}, from checkpoint {plan.checkpoint.name}{lead}, on {device}")
    echo(f"{'step':>6}  {'trajectories':>12}  {'recorded loss':>22}  {'recomputed loss':>22}  result")
    bad, inexact = 0, 0
    for repeated in rerun.rerun(pipeline, plan, seed=config.seed, device=device):
        bad, inexact = bad + (not repeated.ok), inexact + (repeated.ok and not repeated.same_bits)
        losses = f"{_figure(repeated.recorded):>22}  {_figure(repeated.computed):>22}"
        echo(f"{repeated.step:>6}  {repeated.num_trajectories:>12,}  {losses}  {_verdict(repeated)}")
    total = count(plan.last - plan.first + 1, "step")
    if bad:
        echo(f"different from the record: {bad} of {total}. {_advice(run)}")
    elif inexact:
        echo(f"equal to the record: {total}, {inexact} of them only up to rounding.")
    else:
        echo(f"bitwise equal to the record: {total}.")
    return 1 if bad else 0


def _verdict(repeated) -> str:  # noqa: ANN001 - a rerun.RepeatedSteps, whose module needs torch
    if repeated.batch_problem is not None:
        return f"DIFFERENT BATCH: {repeated.batch_problem}"
    if repeated.same_bits:
        return "equal"
    if repeated.ok:
        return "close"
    if repeated.recorded == repeated.computed:
        norms = f"{_figure(repeated.recorded_norm)}, now {_figure(repeated.computed_norm)}"
        return f"DIFFERENT: the gradient norm was {norms}"
    return "DIFFERENT"


def _figure(value: float | None) -> str:
    return "-" if value is None else repr(value)


def _advice(run: RunFolder) -> str:
    """Return what may explain a difference."""
    from rlhf_pipeline.run.continuation import moved_versions

    moved = list(moved_versions(run))
    if moved:
        return f"Versions differ, which may change the last bits: {'; '.join(moved)}."
    return (
        "The versions match the record. A different processor or number of threads (OMP_NUM_THREADS) changes the "
        "last bits. Larger differences mean that the store, the ledger or a checkpoint has changed; "
        "`rlhf-pipeline verify` checks them."
    )


def compare(request: Run, view: RunView) -> int:
    """Compare the replay of a run in recorded order with the run; return 1 if they should be equal but are not."""
    from rlhf_pipeline.report.diff_steps import STEP_VALUES, compare_figures, compare_weights
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.lookup import is_run, run_of_store

    replay = request.pipeline.replay
    if replay is None or not replay.recorded_order:
        return 0
    address = address_of(replay.stores[0])
    source = address if is_run(address) else run_of_store(address)
    if source is None:
        return 0
    run, done = RunFolder.open(source), RunFolder.open(request.run_dir)
    # If the run dropped groups without spread, its mean reward cannot be computed from the store.
    without = {"task_reward"} if run.config.pipeline.get("write", {}).get("zero_variance") == "drop" else set[str]()
    difference = compare_figures(run, done, without=without)
    if not difference.num_both:
        view.echo(f"{source} has no metrics to compare with.")
        return 0
    weights = compare_weights(run, done)
    compared = [what for name, what in STEP_VALUES.items() if name not in without]
    view.echo(_sentence(difference, compared, weights, source))
    if not difference.differences and (weights is None or weights[1]):
        return 0
    reason = _what_was_changed(run, request) or _why_not_exact(run)
    if reason is not None:
        view.echo(reason)
        return 0
    return 1


def _sentence(
    difference: StepsDifference, compared: Sequence[str], weights: tuple[int, bool] | None, source: Address
) -> str:
    if isinstance(source, Path) and source.is_relative_to(Path.cwd()):
        source = source.relative_to(Path.cwd())
    if not difference.differences:
        steps = count(difference.num_both, "step")
        figures = f"{', '.join(compared[:-1])} and {compared[-1]}"
        sentence = f"the same as {source}: {figures} of {steps} are bitwise equal"
    else:
        first = difference.differences[0]
        sentence = (
            f"NOT the same as {source}: the {first.what} differs from step {first.first_step} on, in "
            f"{first.num_steps} of {count(difference.num_both, 'step')}; the largest relative difference is "
            f"{first.largest:.1e}"
        )
    if weights is not None:
        sentence += f"; the weights after step {weights[0]} are {'byte-identical' if weights[1] else 'DIFFERENT'}"
    if difference.only_left is not None:
        sentence += f"; {count(difference.only_left[2], 'step')} of the run were not replayed"
    return f"{sentence}."


def _what_was_changed(run: RunFolder, request: Run) -> str | None:
    """Return which settings of the replay differ from the run's, or None."""
    before = {**dict(run.config.overrides), "definition": run.config.definition, "seed": str(run.config.seed)}
    now = {**dict(request.overrides), "definition": request.definition, "seed": str(request.seed)}
    changed = [
        f"{field['field']} (from step {change['from_step']} on)"
        for change in run.record.history
        for field in change["fields"]
        if field["field"] != "learn.steps"
    ] + [
        name
        for name in {**before, **now}
        if not name.startswith("replay.") and name != "learn.steps" and before.get(name) != now.get(name)
    ]
    return f"a difference is expected, because of these changes: {', '.join(changed)}." if changed else None


def _why_not_exact(run: RunFolder) -> str | None:
    """Return why a run cannot be expected to repeat bit for bit, or None if it can."""
    if any(row.get("processes", 1) != 1 for row in run.metrics):
        return "several processes shared its steps, so gradients were summed in a different order."
    if not run.config.device.startswith("cpu"):
        return f"it ran on {run.config.device}, where results are not reproducible bit for bit."
    return None
