"""What to run, from the command line and a run's record; all of it is checked without torch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_pipeline import definitions
from rlhf_pipeline.cli import preflight
from rlhf_pipeline.cli.output import warn
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import DefinitionError, MissingPathError, RunExistsError, RunMismatchError, typed
from rlhf_pipeline.run.address import Address, address_of
from rlhf_pipeline.run.branch import begin_from, checkpoint_named
from rlhf_pipeline.run.checkpoint import step_of
from rlhf_pipeline.run.folder import RunFolder, Setup, is_run, open_run_or_store, run_of_store
from rlhf_pipeline.run.kept import definition_of, with_kept_inputs

_POLL_S = 0.25
_DEFAULT_REPLAY = "offline_replay"
Overrides = tuple[tuple[str, str], ...]
"""The values of `--set`: each a field's path and its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to run, fully checked."""

    pipeline: Pipeline
    definition: str
    overrides: Overrides
    out: Address
    seed: int
    device: str
    resume: bool = False
    command: str
    """The command that starts this run, without `--resume`."""
    collectors: int = 0
    """Collector processes under a supervisor, besides a learner; 0 runs everything in this process."""
    learners: int = 1
    """Processes that share each step of that learner."""
    joins: bool = False
    """Whether this is one process of several, which continues by the same command."""

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of every kind of run besides its pipeline, by name."""
        names = ("seed", "device", "definition", "overrides")
        return {"run_dir": self.out, **{name: getattr(self, name) for name in names}}

    @property
    def again(self) -> str:
        """The command that continues this run."""
        return self.command if self.joins else f"{self.command} --resume"


def plan_of(
    definition: definitions.Definition, overrides: Overrides, out: Address, *, seed: int, device: str, **more: Any
) -> Plan:
    """Return the plan of a definition with overrides; `more` are further fields of the `Plan`."""
    return Plan(
        pipeline=definition.pipeline(overrides),
        definition=definition.name,
        overrides=overrides,
        out=out,
        seed=seed,
        device=device,
        **more,
    )


def make_plan(args: argparse.Namespace) -> Plan:
    """Plan a run, and check everything that can be checked without torch.

    Raises:
        PipelineError: anything wrong with the definition, the run folder, the model folder or the prompts.
    """
    overrides = _overrides(args)
    if args.begin_from is not None:
        return _branched(args, overrides)
    return checked(_resumed(args, overrides) if args.resume else _new(args, overrides))


def make_joining_plan(args: argparse.Namespace) -> Plan:
    """Plan one process of a run: continue the run in `--run`, or start one there.

    Raises:
        PipelineError: as `make_plan`.
    """
    overrides, out = _overrides(args), address_of(args.run)
    command = f"rlhf-pipeline {args.command} --run {typed(args.run)}"
    if args.command == "learn" and args.definition is None:
        _wait_for_run(out)
    if is_run(out):
        RunFolder.open(out).check_processes(several=True)
        plan = recorded_plan(args, out, args.definition, overrides, command, "choose another --run")
        return checked(replace(plan, joins=True))
    if args.definition is None:
        example = f"rlhf-pipeline {args.command} long_running --run {typed(args.run)}"
        raise DefinitionError(f"{out} is not a run yet, so say what to run, for example: {example}")
    definition, device = definitions.find(args.definition), args.device or "cpu"
    plan = plan_of(definition, overrides, out, seed=args.seed or 0, device=device, command=command, joins=True)
    preflight.check_new_folder(out, command, option="--run")
    return checked(plan)


def _wait_for_run(out: Address) -> None:
    """Wait until a collector has created the run; a learner may be started first.

    Raises:
        RunExistsError: the folder holds something else.
    """
    said = False
    while not is_run(out):
        if not RunFolder(out).is_free:
            raise RunExistsError(f"{out} exists and is not a run. Choose another folder: --run OTHER_FOLDER.")
        if not said:
            example = f"rlhf-pipeline collect long_running --run {typed(out)}"
            warn(f"{out} is not a run yet; waiting for a collector to begin it, for example: {example}")
            said = True
        time.sleep(_POLL_S)


def _overrides(args: argparse.Namespace) -> Overrides:
    steps = getattr(args, "steps", None)
    return (*args.overrides, *([("learn.steps", str(steps))] if steps is not None else []))


def checked(plan: Plan) -> Plan:
    """Check everything that a plan names, without torch.

    Raises:
        PipelineError: something is missing or invalid.
    """
    preflight.check_device(plan.device)
    if plan.joins or plan.collectors:
        preflight.check_processes(plan.pipeline)
    preflight.check_pipeline(plan.pipeline, plan.seed)
    if plan.pipeline.replay is not None and not (plan.resume and RunFolder.open(plan.out).has_chosen):
        preflight.check_stores(plan.pipeline.replay)
    return plan


def _new(args: argparse.Namespace, overrides: Overrides) -> Plan:
    if args.definition is None:
        raise DefinitionError("name what to run, for example: rlhf-pipeline run copy_digits (`rlhf-pipeline list`)")
    if is_run(address_of(args.definition)):
        again = f"rlhf-pipeline run {typed(args.definition)} --resume"
        raise DefinitionError(f"{args.definition} is a run, not a definition. Go on with it: {again}")
    definition = definitions.find(args.definition)
    out = address_of(args.out) if args.out else Path("runs") / definition.function
    command = _command(args.definition, args.out, args)
    plan = plan_of(
        definition,
        overrides,
        out,
        seed=args.seed or 0,
        device=args.device or "cpu",
        command=command,
        collectors=args.collectors or 0,
        learners=args.learners or 1,
    )
    preflight.check_new_folder(out, command)  # after the settings: a slip in one of them is named first
    return plan


def _branched(args: argparse.Namespace, overrides: Overrides) -> Plan:
    """Plan a run from the checkpoint of another one, and make its folder; from then on it is a run to continue."""
    if args.resume:
        raise DefinitionError("--from begins a run and --resume continues one: leave one of them out.")
    source, checkpoint = checkpoint_named(args.begin_from)
    moved = "name its new place before --from: rlhf-pipeline run FILE.py:function --from RUN"
    definition = definition_of(source, args.definition, trust=args.trust, moved=moved)
    out = address_of(args.out) if args.out else Path("runs") / f"{source.path.name}-from-{step_of(checkpoint)}"
    command = _command(args.definition, str(out), args)
    preflight.check_new_folder(out, command)
    plan = checked(
        plan_of(
            definition,
            tuple({**dict(source.config.overrides), **dict(overrides)}.items()),
            out,
            seed=source.config.seed if args.seed is None else args.seed,
            device=args.device or source.config.device,
            command=command,
            resume=True,
            collectors=args.collectors or 0,
            learners=args.learners or 1,
        )
    )
    given = {name: getattr(plan, name) for name in ("pipeline", "definition", "overrides", "seed", "device")}
    begin_from(source, checkpoint, RunFolder(out), Setup(**given))
    return plan


def _resumed(args: argparse.Namespace, overrides: Overrides) -> Plan:
    """Take definition, overrides, seed and device from the run; options on the command line win."""
    named = args.definition
    if named is not None and not args.out and is_run(address_of(named)):
        out, named = address_of(named), None  # `run runs/copy_digits --resume`
    elif args.out:
        out = address_of(args.out)
    elif named is not None:
        out = Path("runs") / definitions.find(named).function
    else:
        raise DefinitionError("name the run to continue: rlhf-pipeline run --resume --out runs/NAME")
    preflight.check_resumable(out)
    command = _command(named, str(out) if args.out or named is None else None, args)
    run = RunFolder.open(out)
    before = run.said("supervisor")
    collectors = args.collectors or before.get("collectors", 0)
    run.check_processes(several=collectors > 0)
    plan = recorded_plan(args, out, named, overrides, command)
    return replace(plan, collectors=collectors, learners=args.learners or before.get("learners", 1))


def recorded_plan(
    args: argparse.Namespace,
    out: Address,
    named: str | None,
    overrides: Overrides,
    command: str,
    otherwise: str = "leave --resume out and choose another --out",
) -> Plan:
    """Return the plan that continues a run, from its record and the command line.

    Args:
        args: the command line.
        out: the run folder.
        named: the definition on the command line, if any.
        overrides: the overrides on the command line.
        command: the command that starts the run.
        otherwise: the alternative if the command line has another seed, for the message.

    Raises:
        RunMismatchError: the definition or the seed differs from the recorded one.
    """
    run = RunFolder.open(out)
    config = run.config
    if args.seed is not None and args.seed != config.seed:
        raise RunMismatchError(
            f"{out} was started with seed {config.seed}, not {args.seed}. Leave --seed out to continue it, "
            f"or {otherwise}."
        )
    forms = {
        "run": f"run FILE.py:function --resume --out {typed(out)}",
        "replay": f"replay --definition FILE.py:function --resume --out {typed(out)}",
    }
    place = forms.get(args.command, f"{args.command} FILE.py:function --run {typed(out)}")
    moved = f"name its new place: rlhf-pipeline {place}"
    definition = definition_of(run, named, trust=args.trust, moved=moved)
    merged = tuple({**dict(with_kept_inputs(run, config.overrides)), **dict(overrides)}.items())
    device = args.device or config.device
    plan = plan_of(definition, merged, out, seed=config.seed, device=device, command=command, resume=True)
    run.check_unchanged(plan.pipeline, config.seed)
    return plan


def _command(definition: str | None, out: str | None, args: argparse.Namespace) -> str:
    parts = ["rlhf-pipeline", "run", *([typed(definition)] if definition else [])]
    options = {"out": out or None} | {name: getattr(args, name, None) for name in ("collectors", "learners", "ray")}
    return " ".join([*parts, *_options(options)])


def _options(given: Mapping[str, object]) -> Iterator[str]:
    """Yield options in command-line form, leaving out those that are None."""
    for name, value in given.items():
        if value is not None:
            yield f"--{name} {typed(value)}"


def make_replay_plan(args: argparse.Namespace) -> Plan:
    """Plan a run over stores, new or continued.

    Raises:
        PipelineError: as `make_plan`, or a store does not exist.
    """
    return checked(_resumed_replay(args) if args.resume else _new_replay(args))


def _resumed_replay(args: argparse.Namespace) -> Plan:
    out = _replay_folder(args)
    if args.paths and not is_run(out):
        raise MissingPathError(
            f"there is no replay to go on with at {out}. Start it: leave --resume out. Or name its folder: --out DIR."
        )
    preflight.check_resumable(out)
    return recorded_plan(args, out, args.definition, _typed_for_replay(args), _replay_command(args))


def _new_replay(args: argparse.Namespace) -> Plan:
    if not args.paths:
        raise DefinitionError("name what to learn from, for example: rlhf-pipeline replay runs/copy_digits")
    for path in args.paths:
        open_run_or_store(path)  # raises an error that names what is there instead
    out, first = _replay_folder(args), address_of(args.paths[0])
    preflight.check_new_folder(out, _replay_command(args))
    overrides, seed, device = (), 0, "cpu"
    if not is_run(first):
        definition = definitions.find(args.definition or _DEFAULT_REPLAY)
    else:
        run = RunFolder.open(first)
        definition = definition_of(run, args.definition, trust=args.trust)
        if args.definition is None or _is_started_with(run, definition):
            overrides, seed, device = _of_a_run(args, run), run.config.seed, run.config.device
    return plan_of(
        definition,
        (*overrides, *_typed_for_replay(args)),
        out,
        seed=seed if args.seed is None else args.seed,
        device=args.device or device,
        command=_replay_command(args),
    )


def _is_started_with(run: RunFolder, definition: definitions.Definition) -> bool:
    """Return whether a run was started with this definition, wherever its file was then."""
    try:
        run.check_unchanged(definition.pipeline(run.config.overrides), run.config.seed, inputs=False)
    except (DefinitionError, RunMismatchError):
        return False
    return True


def _of_a_run(args: argparse.Namespace, run: RunFolder) -> Overrides:
    """Return a run's overrides, and its recorded order unless the command line asks for another."""
    overrides = [pair for pair in run.config.overrides if not pair[0].startswith("replay.")]
    collected = run.config.pipeline.get("replay") is None
    if collected and len(args.paths) == 1 and not (args.filters or args.weights or args.epochs):
        overrides.append(("replay.recorded_order", "true"))
        if run.metrics:
            overrides.append(("learn.steps", str(run.metrics[-1]["step"])))
    return tuple(overrides)


def _typed_for_replay(args: argparse.Namespace) -> Overrides:
    """Return the overrides of the command line, with the stores' folders as absolute paths."""
    places = [address_of(path) for path in args.paths]
    stores = [str(place.absolute() if isinstance(place, Path) else place) for place in places]
    for text in (*stores, *args.filters):
        if "," in text:
            raise DefinitionError(f"'{text}' has a comma, which separates names in a definition's text. Rename it.")
    typed = [("replay.stores", ",".join(stores))] if stores else []
    typed += [("replay.filters", ",".join(args.filters))] if args.filters else []
    typed += [("replay.weights", ",".join(map(str, args.weights)))] if args.weights else []
    typed += [("replay.epochs", str(args.epochs))] if args.epochs is not None else []
    typed += [("learn.steps", str(args.steps))] if args.steps is not None else []
    return (*typed, *args.overrides)


def _replay_folder(args: argparse.Namespace) -> Address:
    if args.out:
        return address_of(args.out)
    if not args.paths:
        raise DefinitionError("name the run to continue: rlhf-pipeline replay --resume --out runs/NAME-replay")
    first = address_of(args.paths[0])
    place = run_of_store(first) or (first.absolute() if isinstance(first, Path) else first)
    return Path("runs") / f"{str(place).rpartition('/')[2]}-replay"


def _replay_command(args: argparse.Namespace) -> str:
    """Return the command that starts the same replay."""
    options = {"definition": args.definition or None, "out": args.out or None}
    return " ".join(["rlhf-pipeline", "replay", *map(typed, args.paths), *_options(options)])
