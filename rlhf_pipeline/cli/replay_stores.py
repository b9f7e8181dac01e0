"""`rlhf-pipeline replay STORE|RUN...`: learn from stores alone, and say whether a replayed run came out the same."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from rlhf_pipeline import definitions
from rlhf_pipeline.cli import preflight, sharded
from rlhf_pipeline.cli.plan import Overrides, Plan, checked, plan_of, recorded_definition, recorded_plan
from rlhf_pipeline.cli.progress import RunView
from rlhf_pipeline.cli.run import run_plan
from rlhf_pipeline.errors import DefinitionError, MissingPathError
from rlhf_pipeline.report.replayed import Comparison, compare
from rlhf_pipeline.report.stored import open_run_or_store
from rlhf_pipeline.report.words import count
from rlhf_pipeline.run.folder import RunFolder, is_run

_DEFAULT = "offline_replay"


def execute(args: argparse.Namespace) -> int:
    """Learn from stores; 1 if the replay of a run should be equal bit for bit and is not."""
    plan = sharded.joined(_resumed(args) if args.resume else _new(args))
    return run_plan(plan, then=lambda view: _compare(plan, view))


def _resumed(args: argparse.Namespace) -> Plan:
    out = _out(args)
    if args.paths and not is_run(out):
        raise MissingPathError(
            f"there is no replay to go on with at {out}. Start it: leave --resume out. Or name its folder: --out DIR."
        )
    preflight.check_resumable(out)
    return checked(recorded_plan(args, out, args.definition, _typed(args), _command(args)))


def _new(args: argparse.Namespace) -> Plan:
    if not args.paths:
        raise DefinitionError("name what to learn from, for example: rlhf-pipeline replay runs/copy_digits")
    for path in args.paths:
        open_run_or_store(path)  # or an error that names what is there
    out, first = _out(args), Path(args.paths[0]).expanduser()
    preflight.check_new_folder(out, _command(args))
    definition, overrides, seed, device = definitions.find(args.definition or _DEFAULT), (), 0, "cpu"
    if args.definition is None and is_run(first):
        definition = recorded_definition(first, "name its new place: --definition FILE.py[:function]")
        config = RunFolder.open(first).config
        overrides, seed, device = _of_a_run(args, RunFolder.open(first)), config.seed, config.device
    return checked(
        plan_of(
            definition,
            (*overrides, *_typed(args)),
            out,
            seed=seed if args.seed is None else args.seed,
            device=args.device or device,
            command=_command(args),
        )
    )


def _of_a_run(args: argparse.Namespace, run: RunFolder) -> Overrides:
    """Return a run's overrides, and its order unless another was asked for."""
    overrides = [pair for pair in run.config.overrides if not pair[0].startswith("replay.")]
    collected = run.config.pipeline.get("replay") is None
    if collected and len(args.paths) == 1 and not (args.filters or args.weights or args.epochs):
        overrides.append(("replay.recorded_order", "true"))
        if run.metrics:
            overrides.append(("learn.steps", str(run.metrics[-1]["step"])))
    return tuple(overrides)


def _typed(args: argparse.Namespace) -> Overrides:
    """Return the typed overrides, with the stores' folders as absolute paths."""
    stores = [str(Path(path).expanduser().absolute()) for path in args.paths]
    for text in (*stores, *args.filters):
        if "," in text:
            raise DefinitionError(f"'{text}' has a comma, which separates names in a definition's text. Rename it.")
    typed = [("replay.stores", ",".join(stores))] if stores else []
    typed += [("replay.filters", ",".join(args.filters))] if args.filters else []
    typed += [("replay.weights", ",".join(map(str, args.weights)))] if args.weights else []
    typed += [("replay.epochs", str(args.epochs))] if args.epochs is not None else []
    typed += [("learn.steps", str(args.steps))] if args.steps is not None else []
    return (*typed, *args.overrides)


def _out(args: argparse.Namespace) -> Path:
    if args.out:
        return Path(args.out).expanduser()
    if not args.paths:
        raise DefinitionError("name the run to continue: rlhf-pipeline replay --resume --out runs/NAME-replay")
    first = Path(args.paths[0]).expanduser().absolute()
    inner = first.name == "store" and is_run(first.parent)
    return Path("runs") / f"{(first.parent if inner else first).name}-replay"


def _command(args: argparse.Namespace) -> str:
    """Return what to type to start the same again."""
    parts = ["rlhf-pipeline", "replay", *args.paths]
    for name, value in (("--definition", args.definition), ("--out", args.out)):
        parts += [name, value] if value else []
    return shlex.join(parts)


def _compare(plan: Plan, view: RunView) -> int:
    """Compare the replay of a run in recorded order with the run; 1 if they should be equal and are not."""
    replay = plan.pipeline.replay
    if replay is None or not replay.recorded_order:
        return 0
    source = Path(replay.stores[0]).expanduser()
    source = source if is_run(source) else source.parent
    if not is_run(source):
        return 0
    run = RunFolder.open(source)
    found = compare(run, RunFolder.open(plan.out))
    if not found.num_steps:
        view.say(f"{source} has no metrics to compare with.")
        return 0
    view.say(_sentence(found, source))
    if found.same:
        return 0
    reason = _what_was_changed(run, plan) or _why_not_exact(run)
    if reason is not None:
        view.say(reason)
        return 0
    return 1


def _sentence(found: Comparison, source: Path) -> str:
    here = Path.cwd()
    source = source.relative_to(here) if source.is_relative_to(here) else source
    steps = count(found.num_steps, "step")
    if found.num_different == 0:
        said = f"the same as {source}: loss, reward and gradient norm of {steps} are equal, bit for bit"
    else:
        first, name = found.different or (0, "")
        said = (
            f"NOT the same as {source}: {found.num_different} of {steps} differ, the first is step {first} ({name}); "
            f"losses by up to {found.largest:.1e} of their size"
        )
    if found.weights_step is not None:
        equal = "equal, byte for byte" if found.same_weights else "DIFFERENT"
        said += f"; the weights after step {found.weights_step} are {equal}"
    if found.num_missing:
        said += f"; {count(found.num_missing, 'step')} of the run were not replayed"
    return f"{said}."


def _what_was_changed(run: RunFolder, plan: Plan) -> str | None:
    """Return which settings of the replay differ from the run's, or None."""
    before = {**dict(run.config.overrides), "definition": run.config.definition, "seed": str(run.config.seed)}
    now = {**dict(plan.overrides), "definition": plan.definition, "seed": str(plan.seed)}
    changed = [
        name
        for name in {**before, **now}
        if not name.startswith("replay.") and name != "learn.steps" and before.get(name) != now.get(name)
    ]
    return f"a difference is expected: {', '.join(changed)} has changed." if changed else None


def _why_not_exact(run: RunFolder) -> str | None:
    """Return why a run cannot be expected to repeat bit for bit, or None where it can."""
    if any(row.get("processes", 1) != 1 for row in run.metrics):
        return "several processes took its steps, and they add gradients up in another order."
    if not run.config.device.startswith("cpu"):
        return f"it ran on {run.config.device}, which does not repeat its bits."
    return None
