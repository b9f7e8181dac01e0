"""The answers to the requests of pages, by address: the same from the server and in a report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_pipeline.errors import DefinitionError, MissingKeyError, PipelineError
from rlhf_pipeline.report.notes import Notes
from rlhf_pipeline.report.query import Answer, View
from rlhf_pipeline.report.status import status
from trajectory_store import StoreError

Query = Mapping[str, Sequence[str]]


def answer(views: Sequence[View], path: str, query: Query) -> Any:
    """Return the answer to one question, as JSON-ready data.

    Args:
        views: the runs, which questions name by their place.
        path: `runs`, `runs/0/metrics`, `runs/0/trajectories`, `runs/0/trajectories/17`, `runs/0/groups/3`, ...;
            `runs/0/prompts/17` is how the prompt of trajectory 17 went in all runs; `runs/0~38fae440/...` is a store
            of its evaluations.
        query: the arguments.

    Raises:
        MissingKeyError: there is no such question, run, trajectory, group or step.
        DefinitionError: an argument cannot be read.
        StoreError: the store is damaged.
    """
    match path.split("/"):
        case ["runs"]:
            return [{"key": key, **_about(view)} for key, view in enumerate(views)]
        case ["runs", run, what]:
            return _of_run(view_of(views, run), what, query)
        case ["runs", run, "trajectories", name]:
            return view_of(views, run).trajectory(_number(name), first=_first(query, "first", 0))
        case ["runs", run, "groups", name]:
            return view_of(views, run).group(_number(name))
        case ["runs", run, "steps", name]:
            return view_of(views, run).step(_number(name), offset=_first(query, "offset", 0))
        case ["runs", run, "lists", name]:
            cause, offset = _text(query, "cause", ""), _first(query, "offset", 0)
            return view_of(views, run).list(name, cause=cause, offset=offset)
        case ["runs", run, "prompts", name]:
            prompt = view_of(views, run).prompt_text(_number(name))
            everywhere = [{"key": key, **view.prompt(prompt)} for key, view in enumerate(views)]
            return {"prompt": prompt.decode("utf-8", "replace"), "runs": everywhere}
    raise MissingKeyError(f"there is no page {path}.")


def _of_run(view: View, what: str, query: Query) -> Any:
    match what:
        case "metrics":
            points = min(_first(query, "points", 600), 2000)
            return view.metrics(query.get("names", ()), points=max(points, 2), after=_first(query, "after", 0))
        case "trajectories":
            return view.trajectories(
                text=_text(query, "text", ""),
                column=_text(query, "in", "completion"),
                where=query.get("where", ()),
                sort=_text(query, "sort", "") or "-id",
                offset=_first(query, "offset", 0),
                limit=_first(query, "limit", 50),
                snapshot=_first(query, "snapshot", 0) or None,
                everything="all" in query,
                columns=query.get("columns", ()),
                prompt_of=_number(_text(query, "prompt_of", "")) if query.get("prompt_of") else None,
            )
        case "fields":
            return view.fields()
        case "facets":
            return view.facets(
                query.get("where", ()),
                text=_text(query, "text", ""),
                column=_text(query, "in", "completion"),
                prompt_of=_number(_text(query, "prompt_of", "")) if query.get("prompt_of") else None,
                snapshot=_first(query, "snapshot", 0) or None,
            )
        case "stats":
            return view.stats(query.get("where", ()))
        case "health":
            return {**view.health(), **(status(view, time.time()) if view.run is not None else {})}
        case "definition":
            return view.definition()
        case "evaluations":
            return view.evaluations()
        case "notes":
            notes = Notes(view.address)
            return {"path": None if notes.path is None else str(notes.path), "notes": notes.read()}
        case "changes":
            return view.changes()
    raise MissingKeyError(f"a run has no page {what}.")


def _about(view: View) -> Answer:
    """Return a run in one row; one that cannot be read gives the reason, and hides no other."""
    try:
        return view.about()
    except (PipelineError, StoreError) as error:
        return {"name": view.name, "address": str(view.address), "error": str(error), "processes": []}


def exported(views: Sequence[View], run: str, query: Query) -> tuple[View, list[str]]:
    """Return the requested run, and the conditions that select the rows that the same request shows.

    Raises:
        MissingKeyError: there is no such run, or trajectory whose prompt is asked for.
    """
    view = view_of(views, run)
    prompt_of = _number(_text(query, "prompt_of", "")) if query.get("prompt_of") else None
    text, column = _text(query, "text", ""), _text(query, "in", "completion")
    return view, view.matching(query.get("where", ()), text=text, column=column, prompt_of=prompt_of)


def view_of(views: Sequence[View], run: str) -> View:
    """Return a run by its position, or a store of its evaluations by `POSITION~NAME`."""
    number, _, evaluation = run.partition("~")
    if not number.isdecimal() or len(number) > 18 or int(number) >= len(views):
        raise MissingKeyError(f"there is no run {run[:20]}.")
    return views[int(number)].evaluation(evaluation) if evaluation else views[int(number)]


def _text(query: Query, name: str, default: str) -> str:
    return query[name][-1] if query.get(name) else default


def _first(query: Query, name: str, default: int) -> int:
    text = _text(query, name, str(default))
    if not text.isdecimal() or len(text) > 18:
        raise DefinitionError(f"{name}={text[:20]} is not valid; it must be a whole number of at least 0.")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise MissingKeyError(f"{text[:20]!r} is not a valid number.")
    return int(text)
