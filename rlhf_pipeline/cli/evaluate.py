"""`rlhf-pipeline evaluate`: the reward of a checkpoint, or of a model folder, on held-out prompts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_pipeline.cli.output import echo, echo_json
from rlhf_pipeline.cli.parser import above_zero, add_json, add_overrides, add_trust, natural, positive
from rlhf_pipeline.errors import DefinitionError, MissingPathError, RunMismatchError, typed

if TYPE_CHECKING:
    from rlhf_pipeline.config import Pipeline
    from rlhf_pipeline.run.address import Address
    from rlhf_pipeline.run.events import Event
    from rlhf_pipeline.run.folder import RunFolder

HELP = "evaluate a checkpoint of a run, or a model folder, on held-out prompts"
DETAILS = """\
Samples completions for the prompts in the definition's evaluate=Evaluate(...), or in the --prompts file, and grades the
completions with the definition's reward function. Reports the mean reward (with a 95 % confidence interval over
prompts), pass@k and the mean length. The rows are stored with the run's evaluations, marked as evaluation rows, and
never used for training.
Rows that are already stored are reused, not sampled again.

examples:
  rlhf-pipeline evaluate runs/copy_digits                       the newest checkpoint
  rlhf-pipeline evaluate runs/mine --best --prompts test.jsonl  the best checkpoint, on other prompts
  rlhf-pipeline evaluate runs/mine --step 40 --group-size 8     pass@8 of the checkpoint of step 40
  rlhf-pipeline evaluate model --definition gsm8k --prompts test.jsonl

See docs/evaluation.md."""


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("path", metavar="RUN|MODEL", help="a run; or, with --definition, a model folder")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=natural, metavar="N", help="the checkpoint of step N (default: the newest)")
    which.add_argument("--best", action="store_true", help="the best checkpoint according to the run's evaluations")
    command.add_argument(
        "--prompts", metavar="FILE", help="a prompt file; it is read with the definition's prompt settings"
    )
    command.add_argument("--num-prompts", type=positive, metavar="N", help="use the first N prompts")
    command.add_argument(
        "--group-size",
        type=positive,
        metavar="K",
        help=("number of completions per prompt; pass@k is computed for values of k up to K"),
    )
    command.add_argument(
        "--temperature",
        type=_temperature,
        metavar="T",
        help=("sampling temperature; 0 selects the most probable token"),
    )
    command.add_argument(
        "--definition",
        "--pipeline",
        metavar="NAME|FILE.py[:function]",
        help="the definition that specifies the reward function and the sampling settings (default: the definition of "
        "the run)",
    )
    command.add_argument(
        "--out",
        metavar="DIR",
        help=("the folder in which to store the evaluation rows of a MODEL (default: runs/MODEL-evaluation)"),
    )
    command.add_argument("--device", metavar="D", help="cpu, cuda, cuda:1 or mps (default: the run's device, or cpu)")
    add_overrides(command)
    add_trust(command)
    add_json(command)


def execute(args: argparse.Namespace) -> int:
    """Evaluate, and print the figures and what to look at next."""
    from rlhf_pipeline.cli.process import view_of_stdout
    from rlhf_pipeline.cli.torchrun import import_torch
    from rlhf_pipeline.errors import count
    from rlhf_pipeline.report.formatting import evaluation_words
    from rlhf_pipeline.run.evaluation_rows import evaluation_store
    from rlhf_pipeline.run.events import EvaluationDone
    from rlhf_pipeline.run.folder import RunFolder

    run, pipeline, where = _request(args)
    view = view_of_stdout()

    evaluations: list[EvaluationDone] = []

    def hear(event: Event) -> None:
        if isinstance(event, EvaluationDone):
            evaluations.append(event)
        elif not args.json:
            view(event)

    import_torch(where["device"])
    from rlhf_pipeline.run.evaluate_once import evaluate_once

    figures, step, sets = evaluate_once(pipeline, on_event=hear, **where), where["step"], pipeline.evaluations
    folder = RunFolder(where["run_dir"])
    stores = {name: evaluation_store(folder, pipeline, settings, name) for name, settings in sets.items()}
    if args.json:
        store_paths = {name: str(store) for name, store in stores.items()}
        echo_json(
            {"step": step, **({"store": store_paths[""]} if "" in store_paths else {"stores": store_paths}), **figures}
        )
        return 0
    what = args.path if run is None else f"{args.path}, step {step}"
    for event in evaluations:
        settings_of_set = sets[event.name]
        per_prompt = count(settings_of_set.group_size, "completion")
        each = f"{per_prompt} per prompt at temperature {settings_of_set.temperature:g}"
        name = f", {event.name}" if event.name else ""
        echo(f"{what}{name}: {evaluation_words(event.figures)}\n  {each}\nstored: {stores[event.name]}")
    echo("next:")
    for command, meaning in _next_commands(args.path, run, step, next(iter(stores.values()))):
        echo(f"  {command}\n      {meaning}")
    return 0


EvaluationRequest = tuple["RunFolder | None", "Pipeline", dict[str, Any]]
"""The run, if it is one; what to evaluate; and the other arguments of `evaluate_once`."""


def _request(args: argparse.Namespace) -> EvaluationRequest:
    """Check the command line, without torch."""
    from rlhf_pipeline.policies.model_source import is_model as is_model_at
    from rlhf_pipeline.run.address import address_of
    from rlhf_pipeline.run.lookup import is_run
    from rlhf_pipeline.run.place import not_found
    from rlhf_pipeline.run.preflight import check_device, check_evaluation

    address = address_of(args.path)
    is_model = isinstance(address, Path) and is_model_at(address)
    if not is_model and not is_run(address):
        raise not_found(address, "run or model folder")
    request = _of_model(args) if is_model else _of_run(args, address)
    check_device(request[2]["device"])
    for name in request[1].evaluations:
        check_evaluation(request[1], name, apart=not is_model)
    return request


def _of_model(args: argparse.Namespace) -> EvaluationRequest:
    from rlhf_pipeline import definitions
    from rlhf_pipeline.config import PretrainedPolicy

    if args.definition is None:
        raise DefinitionError(
            f"{args.path} is a model folder, which has no reward function. Specify a definition that has one, for "
            f"example: rlhf-pipeline evaluate {typed(args.path)} --definition gsm8k --prompts FILE"
        )
    if args.step is not None or args.best:
        raise DefinitionError(f"--step and --best select a checkpoint of a run, but {args.path} is a model folder.")
    place = Path(args.path).expanduser()
    pipeline = definitions.find(args.definition).pipeline(tuple(args.overrides))
    policy = pipeline.policy
    if isinstance(policy, PretrainedPolicy):
        policy = replace(policy, path=str(place), lora_rank=0)  # the folder has whole weights; new adapters do nothing
    else:
        policy = PretrainedPolicy(path=str(place), chat_template=policy.chat_template)
    pipeline = replace(pipeline, policy=policy)
    folder = Path(args.out or f"runs/{place.resolve().name}-evaluation").expanduser()
    where = {"run_dir": folder, "checkpoint": None, "step": 0, "seed": 0, "device": args.device or "cpu"}
    return None, _evaluated(pipeline, args), where


def _of_run(args: argparse.Namespace, address: Address) -> EvaluationRequest:
    from rlhf_pipeline.run.branch import checkpoint_of
    from rlhf_pipeline.run.checkpoint import step_of
    from rlhf_pipeline.run.config_diff import changes
    from rlhf_pipeline.run.folder import RunFolder
    from rlhf_pipeline.run.saved_inputs import definition_of, with_copied_inputs

    if args.out is not None:
        raise DefinitionError(
            "--out sets the folder for the evaluation rows of a model folder, but the evaluation rows of a run are "
            "stored in the run folder. Omit --out."
        )
    run = RunFolder.open(address)
    definition = definition_of(run, args.definition, trust=args.trust)
    recorded = definition.pipeline((*with_copied_inputs(run, run.config.overrides), *args.overrides))
    before = run.config.pipeline
    policy_changes = [
        change for change in changes({"policy": before.get("policy")}, recorded) if change.field[:7] == "policy."
    ]
    if wrong := [str(change) for change in policy_changes if change.field != "policy.path"]:
        raise RunMismatchError(f"{address} was started with another model: {'; '.join(wrong)}. Use the recorded model.")
    pipeline = _evaluated(recorded, args)
    step = _best_step(run, recorded) if args.best else args.step
    checkpoint = checkpoint_of(run, step, form="--step {step}")
    where = {"run_dir": address, "checkpoint": checkpoint, "step": step_of(checkpoint)}
    return run, pipeline, {**where, "seed": run.config.seed, "device": args.device or run.config.device}


def _evaluated(pipeline: Pipeline, args: argparse.Namespace) -> Pipeline:
    """Return a definition that evaluates what the command line specifies."""
    from rlhf_pipeline.config import Evaluate
    from rlhf_pipeline.data.prompts import Prompts

    names = ("num_prompts", "group_size", "temperature")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    settings["best"] = None  # chooses among the steps of a run; it may need a larger group than this one
    sets = pipeline.evaluations
    if args.prompts is not None:
        first = next(iter(sets.values()), None)
        sources = (pipeline.prompts if first is None else first.prompts, pipeline.prompts)
        like = next((source for source in sources if isinstance(source, Prompts)), None)
        settings["prompts"] = (
            Prompts(path=args.prompts) if like is None else replace(like, path=args.prompts, rows=None, limit=None)
        )
    if args.prompts is not None and len(sets) > 1:  # others than those of any set
        return replace(pipeline, evaluate=replace(sets[next(iter(sets))], **settings))
    if isinstance(pipeline.evaluate, dict):
        return replace(pipeline, evaluate={name: replace(evaluation, **settings) for name, evaluation in sets.items()})
    if pipeline.evaluate is not None:
        return replace(pipeline, evaluate=replace(pipeline.evaluate, **settings))
    if args.prompts is None:
        raise DefinitionError("the definition has no evaluate=Evaluate(...), so prompts are required: --prompts FILE")
    return replace(pipeline, evaluate=Evaluate(**settings))


def _best_step(run: RunFolder, pipeline: Pipeline) -> int:
    """Return the kept step with the highest figure `best` in the run's own evaluations."""
    from rlhf_pipeline.config import deciding_set
    from rlhf_pipeline.run.checkpoint import step_of
    from rlhf_pipeline.run.evaluation_rows import evaluation_store, figure_for_best, stored_evaluations
    from rlhf_pipeline.run.place import is_store
    from trajectory_store import TrajectoryStore

    sets = pipeline.evaluations
    if not sets:
        raise DefinitionError("--best needs the run's evaluations, but its definition has no evaluate=.")
    name = deciding_set(sets)
    name = next(iter(sets)) if name is None else name
    path = evaluation_store(run, pipeline, sets[name], name)
    if not is_store(path):
        raise MissingPathError(f"{run.address} has no evaluations yet at {path}. Omit --best, or specify --step.")
    saved_steps = {step_of(checkpoint) for checkpoint in run.saved()}
    with TrajectoryStore.open(path, mode="r") as store:
        candidates = [
            (-mean, figures["step"])
            for figures in stored_evaluations(store, sets[name])
            if (mean := figure_for_best(figures, sets[name].best)) is not None and figures["step"] in saved_steps
        ]
    if not candidates:
        raise MissingPathError(f"none of the evaluated steps of {run.address} has a checkpoint. Omit --best.")
    return min(candidates)[1]


def _next_commands(path: str, run: RunFolder | None, step: int, store: Address) -> Iterator[tuple[str, str]]:
    """Yield useful next commands, each with its meaning."""
    from rlhf_pipeline.run.checkpoint import step_of

    yield f"rlhf-pipeline view {typed(store)}", "the completions, in a browser"
    yield f"rlhf-pipeline stats {typed(store)} --filter 'version=={step}'", "their rewards and lengths"
    if alternatives := [
        saved_step for saved_step in map(step_of, run.saved() if run is not None else ()) if saved_step != step
    ]:
        yield f"rlhf-pipeline evaluate {typed(path)} --step {alternatives[-1]}", "another saved checkpoint"


def _temperature(text: str) -> float:
    """Read a number from 0 up."""
    return 0.0 if text in ("0", "0.0") else above_zero(text)
