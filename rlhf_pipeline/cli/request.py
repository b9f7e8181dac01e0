"""The run that a command line requests: its arguments and the record of a run. Imports no torch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_pipeline import definitions
from rlhf_pipeline.cli.output import warn
from rlhf_pipeline.errors import DefinitionError, MissingPathError, RunExistsError, RunMismatchError, typed
from rlhf_pipeline.run.address import Address, absolute, address_of
from rlhf_pipeline.run.branch import begin_from, checkpoint_named
from rlhf_pipeline.run.checkpoint import step_of
from rlhf_pipeline.run.completeness import is_free
from rlhf_pipeline.run.continuation import check_free_or_recorded, check_unchanged
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.lookup import is_run, open_run_or_store, run_of_store
from rlhf_pipeline.run.processes.children import SupervisorConfig
from rlhf_pipeline.run.run import Run
from rlhf_pipeline.run.saved_inputs import Overrides, definition_of, with_copied_inputs

_POLL_S = 0.25
_DEFAULT_REPLAY = "offline_replay"


def requested_run(args: argparse.Namespace) -> Run:
    """Return the run that `run`, `replay`, `collect` or `learn` asks for, checked as far as that needs no torch.

    With `--from` its folder is made; from then on it is a run to continue.
    """
    if args.command in ("collect", "learn"):
        return _joining(args).checked()
    if args.command == "replay":
        return (_resumed_replay(args) if args.resume else _new_replay(args)).checked()
    if args.begin_from is not None:
        return _branched(args)
    return (_resumed(args) if args.resume else _new(args)).checked()


def _new_run(
    args: argparse.Namespace,
    definition: definitions.Definition,
    overrides: Overrides,
    out: Address,
    *,
    seed: int = 0,
    device: str = "cpu",
    **more: Any,
) -> Run:
    """Return the run of a definition; seed and device of the command line come first."""
    return Run(
        pipeline=definition.pipeline(overrides),
        definition=definition.name,
        overrides=overrides,
        run_dir=out,
        seed=seed if args.seed is None else args.seed,
        device=args.device or device,
        progress_timeout_s=getattr(args, "progress_timeout", None),
        **more,
    )


def _recorded(
    args: argparse.Namespace, out: Address, definition_name: str | None, place: str, overrides: Overrides, **more: Any
) -> Run:
    """Return the run that continues in a folder, from its record and the command line."""
    run = RunFolder.open(out)
    config = run.config
    if args.seed is not None and args.seed != config.seed:
        otherwise = "choose another --run" if "joins" in more else "omit --resume and choose another --out"
        raise RunMismatchError(
            f"{out} was started with seed {config.seed}, not {args.seed}. Omit --seed to continue it, or {otherwise}."
        )
    form = "--definition FILE.py:function" if args.command == "replay" else "FILE.py:function"
    moved = f"specify its new path: rlhf-pipeline {args.command} {form} {place} {typed(out)}"
    definition = definition_of(run, definition_name, trust=args.trust, moved=moved)
    merged = _merged(with_copied_inputs(run, config.overrides), overrides)
    return _new_run(args, definition, merged, out, seed=config.seed, device=config.device, resume=True, **more)


def _joining(args: argparse.Namespace) -> Run:
    """Return one process of a run: it continues the run in `--run`, or starts one there."""
    out, definition_name = address_of(args.run), args.definition
    more = {"command": _command(args, run=args.run), "joins": args.command}
    if args.command == "learn" and definition_name is None:
        _wait_for_run(out)
    if is_run(out):
        return _recorded(args, out, definition_name, "--run", _overrides(args), **more)
    if definition_name is None:
        example = f"rlhf-pipeline {args.command} long_running --run {typed(args.run)}"
        raise DefinitionError(f"{out} is not a run yet, so a definition is required, for example: {example}")
    return _new_run(args, definitions.find(definition_name), _overrides(args), out, **more)


def _wait_for_run(out: Address) -> None:
    """Wait until a collector has created the run; a learner may be started first."""
    reported = False
    while not is_run(out):
        if not is_free(RunFolder(out)):
            raise RunExistsError(f"{out} exists, but is not a run. Choose another folder: --run OTHER_FOLDER.")
        if not reported:
            example = f"rlhf-pipeline collect long_running --run {typed(out)}"
            warn(f"{out} is not a run yet; waiting for a collector to create it, for example: {example}")
            reported = True
        time.sleep(_POLL_S)


def _new(args: argparse.Namespace) -> Run:
    definition_name = args.definition
    if definition_name is None:
        raise DefinitionError(
            "a definition is required, for example: rlhf-pipeline run copy_digits (`rlhf-pipeline list` "
            "prints all definitions)"
        )
    if is_run(address_of(definition_name)):
        again = f"rlhf-pipeline run {typed(definition_name)} --resume"
        raise DefinitionError(f"{definition_name} is a run, not a definition. Continue it: {again}")
    definition = definitions.find(definition_name)
    out = address_of(args.out) if args.out else Path("runs") / definition.function
    command = _command(args, definition_name, out=args.out)
    return _new_run(args, definition, _overrides(args), out, command=command, supervised=_supervisor(args))


def _branched(args: argparse.Namespace) -> Run:
    """Return a run from the checkpoint of another one, and make its folder."""
    if args.resume:
        raise DefinitionError("--from starts a new run and --resume continues a run. Omit one of them.")
    source, checkpoint = checkpoint_named(args.begin_from)
    moved = "specify its new path before --from: rlhf-pipeline run FILE.py:function --from RUN"
    run = _new_run(
        args,
        definition_of(source, args.definition, trust=args.trust, moved=moved),
        _merged(source.config.overrides, _overrides(args)),
        out := address_of(args.out or f"runs/{source.path.name}-from-{step_of(checkpoint)}"),
        seed=source.config.seed,
        device=source.config.device,
        command=_command(args, args.definition, out=out),
        supervised=_supervisor(args),
    ).checked()
    begin_from(source, checkpoint, RunFolder(out), run)
    return replace(run, resume=True)


def _resumed(args: argparse.Namespace) -> Run:
    """Take definition, overrides, seed and device from the run; options on the command line win."""
    definition_name = args.definition
    if definition_name is not None and not args.out and is_run(address_of(definition_name)):
        out, definition_name = address_of(definition_name), None  # `run runs/copy_digits --resume`
    elif args.out:
        out = address_of(args.out)
    elif definition_name is not None:
        out = Path("runs") / definitions.find(definition_name).function
    else:
        raise DefinitionError("specify the run to continue: rlhf-pipeline run --resume --out runs/NAME")
    folder = RunFolder(out)
    check_free_or_recorded(folder, resume=True)
    command = _command(args, definition_name, out=out if args.out or definition_name is None else None)
    supervised = _supervisor(args, folder.place.heartbeat_of("supervisor"))
    return _recorded(
        args, out, definition_name, "--resume --out", _overrides(args), command=command, supervised=supervised
    )


def _resumed_replay(args: argparse.Namespace) -> Run:
    out = _replay_folder(args)
    if args.paths and not is_run(out):
        raise MissingPathError(
            f"there is no replay to continue at {out}. Omit --resume to start a new one, or specify the folder of "
            "an existing one: --out DIR."
        )
    check_free_or_recorded(RunFolder(out), resume=True)
    overrides, command = _typed_for_replay(args), _replay_command(args)
    return _recorded(args, out, args.definition, "--resume --out", overrides, command=command)


def _new_replay(args: argparse.Namespace) -> Run:
    if not args.paths:
        raise DefinitionError("specify the stores to learn from, for example: rlhf-pipeline replay runs/copy_digits")
    for path in args.paths:
        open_run_or_store(path)  # raises an error that names what is there instead
    first, overrides, recorded = address_of(args.paths[0]), (), {}
    if not is_run(first):
        definition = definitions.find(args.definition or _DEFAULT_REPLAY)
    else:
        run = RunFolder.open(first)
        definition = definition_of(run, args.definition, trust=args.trust)
        if args.definition is None or _is_started_with(run, definition):
            overrides, recorded = _of_a_run(args, run), {"seed": run.config.seed, "device": run.config.device}
    overrides = (*overrides, *_typed_for_replay(args))
    return _new_run(args, definition, overrides, _replay_folder(args), command=_replay_command(args), **recorded)


def _is_started_with(run: RunFolder, definition: definitions.Definition) -> bool:
    """Return whether a run was started with this definition, wherever its file was then."""
    try:
        check_unchanged(run, definition.pipeline(run.config.overrides), run.config.seed, inputs=False)
    except (DefinitionError, RunMismatchError):
        return False
    return True


def _of_a_run(args: argparse.Namespace, run: RunFolder) -> Overrides:
    """Return a run's overrides, and its recorded order unless the command line asks for another."""
    overrides = [pair for pair in run.config.overrides if not pair[0].startswith("replay.")]
    collected = run.config.pipeline.get("replay") is None
    if collected and len(args.paths) == 1 and not (args.filters or args.weights or args.epochs or args.skip_damaged):
        overrides.append(("replay.recorded_order", "true"))
        if run.metrics:
            overrides.append(("learn.steps", str(run.metrics[-1]["step"])))
    return tuple(overrides)


def _typed_for_replay(args: argparse.Namespace) -> Overrides:
    """Return the overrides of the command line, with the stores' folders as absolute paths."""
    places = [address_of(path) for path in args.paths]
    stores = [str(absolute(place)) for place in places]
    for text in (*stores, *args.filters):
        if "," in text:
            advice = "Rename the folder." if text in stores else "Use a condition without a comma."
            raise DefinitionError(f"'{text}' contains a comma, but commas separate list items. {advice}")
    epochs = [] if args.epochs is None else [args.epochs]
    skip = ["true"] if args.skip_damaged else []
    lists = {"stores": stores, "filters": args.filters, "weights": args.weights, "epochs": epochs, "skip_damaged": skip}
    overrides = [(f"replay.{name}", ",".join(map(str, values))) for name, values in lists.items() if values]
    return (*overrides, *_steps(args), *args.overrides)


def _replay_folder(args: argparse.Namespace) -> Address:
    if args.out:
        return address_of(args.out)
    if not args.paths:
        raise DefinitionError("specify the run to continue: rlhf-pipeline replay --resume --out runs/NAME-replay")
    first = address_of(args.paths[0])
    place = run_of_store(first) or absolute(first)
    return Path("runs") / f"{str(place).rpartition('/')[2]}-replay"


def _replay_command(args: argparse.Namespace) -> str:
    return _command(args, *args.paths, definition=args.definition, out=args.out)


def _command(args: argparse.Namespace, *words: str | None, **options: object) -> str:
    """Return the command that starts the same run, without `--resume`."""
    option_values = options | {name: getattr(args, name, None) for name in ("collectors", "learners", "ray")}
    option_words = [f"--{name} {typed(value)}" for name, value in option_values.items() if value]
    return " ".join(["rlhf-pipeline", args.command, *(typed(word) for word in words if word), *option_words])


def _supervisor(args: argparse.Namespace, before: Mapping[str, int] | None = None) -> SupervisorConfig | None:
    """Return the processes of a supervisor, by default as many as it had before; None without collectors."""
    numbers = {name: getattr(args, name) or (before or {}).get(name) for name in ("collectors", "learners")}
    if not numbers["collectors"]:
        return None
    return SupervisorConfig(
        collectors=numbers["collectors"],
        learners=numbers["learners"] or 1,
        max_failures=args.max_failures,
        hang_timeout_s=args.hang_timeout,
        progress_timeout_s=args.progress_timeout,
    )


def _overrides(args: argparse.Namespace) -> Overrides:
    return (*args.overrides, *_steps(args))


def _steps(args: argparse.Namespace) -> Overrides:
    steps = getattr(args, "steps", None)
    return () if steps is None else (("learn.steps", str(steps)),)


def _merged(recorded: Overrides, typed: Overrides) -> Overrides:
    return tuple({**dict(recorded), **dict(typed)}.items())
