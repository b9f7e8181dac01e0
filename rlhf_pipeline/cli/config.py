"""`rlhf-pipeline config`: the meaning, bounds and default of every setting, and its value in a definition."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from rlhf_pipeline.cli.output import echo, echo_raw

HELP = "show the meaning, bounds and default of every setting"
DETAILS = """\
Shows every field of a definition. With the name of a pipeline or the path of your own file, shows the values in that
definition. With a field, or a part of the definition such as `sample`, shows what each field means. The bounds of a
field are checked whether you set it in Python or with --set.

examples:
  rlhf-pipeline config                       all settings and their defaults
  rlhf-pipeline config learn.lr              the meaning and bounds of one setting
  rlhf-pipeline config sample                all settings in one part of the definition
  rlhf-pipeline config copy_digits           the values in a definition; changed values are marked
  rlhf-pipeline config ./my_task.py learn.lr
  rlhf-pipeline config metrics               the meaning and unit of each metric in metrics.jsonl

To change a setting: `rlhf-pipeline run NAME --set learn.lr=3e-4`."""

_NAME_WIDTH = 30
_VALUE_WIDTH = 24


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "names",
        nargs="*",
        metavar="PIPELINE|FIELD",
        help="a definition, a field, a definition and a field, or `metrics`",
    )
    command.add_argument(
        "--markdown",
        action="store_true",
        help="print a reference page: docs/settings.md, or the page for `metrics`, `commands` or `errors`",
    )


def execute(args: argparse.Namespace) -> int:
    """Print the requested settings."""
    from rlhf_pipeline import definitions
    from rlhf_pipeline.config import Pipeline
    from rlhf_pipeline.errors import DefinitionError, did_you_mean
    from rlhf_pipeline.settings import paths_of

    if args.names == ["metrics"]:
        from rlhf_pipeline.report import figures

        if args.markdown:
            echo_raw("\n".join(figures.page()))
        else:
            echo("\n".join(map(_figure, figures.figures().values())))
        return 0
    if args.markdown and args.names in (["commands"], ["errors"]):
        from rlhf_pipeline.cli import reference_pages

        echo_raw(
            "\n".join(reference_pages.commands_page() if args.names == ["commands"] else reference_pages.errors_page())
        )
        return 0
    if args.markdown and args.names:
        raise DefinitionError(
            "--markdown prints a complete page. Specify no name (for all settings), or one of `metrics`, `commands` "
            "and `errors`."
        )
    if args.markdown:
        echo_raw("\n".join(page()))
        return 0
    settings_by_path = dict(_all_paths())
    names = list(args.names)
    field = names.pop() if names and (names[-1] in settings_by_path or len(names) > 1) else None
    if len(names) > 1 or (names and names[0] in settings_by_path):
        raise DefinitionError(
            "specify at most one definition and one field, for example: rlhf-pipeline config learn.lr"
        )
    pipeline = None
    if names:
        try:
            pipeline = definitions.find(names[0]).pipeline()
        except DefinitionError as error:
            near = did_you_mean(names[0], settings_by_path)
            if near.startswith(" Did"):
                raise DefinitionError(f"'{names[0]}' is neither a setting nor a pipeline.{near}") from error
            raise
        settings_by_path = dict(_declared(pipeline))
    if field is not None and field not in settings_by_path:
        raise DefinitionError(f"there is no setting '{field}'.{did_you_mean(field, settings_by_path)}")
    paths = [path for path, _ in (paths_of(Pipeline) if pipeline is None else _paths_in(pipeline))]
    selected_paths = [path for path in paths if field is None or path == field or path.startswith(f"{field}.")]
    if field is not None and len(selected_paths) <= 1:
        echo("\n".join(_setting_lines(field, settings_by_path[field], pipeline)))
    else:
        echo("\n".join(_table(selected_paths, settings_by_path, pipeline)))
    return 0


def _all_paths() -> Iterator[tuple[str, Any]]:
    from rlhf_pipeline.config import Pipeline
    from rlhf_pipeline.data.prompts import CopyDigits, Prompts
    from rlhf_pipeline.settings import paths_of

    yielded: set[str] = set()
    for kind, prefix in ((Pipeline, ""), (CopyDigits, "prompts."), (Prompts, "prompts.")):
        for path, item in paths_of(kind, prefix):
            if path not in yielded:
                yielded.add(path)
                yield path, item


def _declared(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths of a definition with the declarations of the classes that it uses, also of custom classes."""
    from rlhf_pipeline.settings import paths_of, settings_of

    for item in settings_of(type(config)):
        declared = getattr(config, item.name)
        yield f"{prefix}{item.name}", item
        if dataclasses.is_dataclass(declared):
            yield from _declared(declared, f"{prefix}{item.name}.")
        else:  # a group that is excluded
            for group in item.groups:
                yield from paths_of(group, f"{prefix}{item.name}.")


def _paths_in(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of a definition, each group before its fields."""
    for item in dataclasses.fields(config):
        declared = getattr(config, item.name)
        yield f"{prefix}{item.name}", declared
        if dataclasses.is_dataclass(declared):
            yield from _paths_in(declared, f"{prefix}{item.name}.")


def _table(paths: list[str], settings_by_path: dict[str, Any], pipeline: Any) -> Iterator[str]:
    values = dict(_paths_in(pipeline)) if pipeline is not None else {}
    columns = shutil.get_terminal_size((110, 24)).columns
    for path in paths:
        item = settings_by_path.get(path)
        meaning = "" if item is None else item.help
        if item is not None and item.groups:
            yield textwrap.shorten(f"{path}: {meaning}", max(columns, 40), placeholder=" ...")
            continue
        cell = _value_text(values[path]) if path in values else ("" if item is None else _default(item))
        mark = "*" if path in values and (item is None or not _is_default(item, values[path])) else " "
        start = (
            f" {mark}{path:<{_NAME_WIDTH}} {textwrap.shorten(cell, _VALUE_WIDTH, placeholder='...'):<{_VALUE_WIDTH}} "
        )
        yield (start + textwrap.shorten(meaning, max(columns - len(start), 20), placeholder=" ...")).rstrip()
    if pipeline is not None:
        yield "* differs from the default. To set a value: rlhf-pipeline run ... --set KEY.PATH=VALUE"


def _setting_lines(path: str, item: Any, pipeline: Any) -> Iterator[str]:
    columns = min(max(shutil.get_terminal_size((100, 24)).columns, 40), 100)
    yield f"{path}: {item.kind()}"
    yield f"default: {_default(item)}"
    values = dict(_paths_in(pipeline)) if pipeline is not None else {}
    if path in values:
        yield f"here:    {_value_text(values[path])}"
    yield textwrap.fill(item.help, columns)


def _figure(figure: Any) -> str:
    return f"  {figure.name:<20} {figure.unit:<13} {figure.meaning}"


def _default(item: Any) -> str:
    if item.default is dataclasses.MISSING:
        return "required"
    return _value_text(item.default)


def _is_default(item: Any, value: Any) -> bool:
    return item.default is not dataclasses.MISSING and item.default == value


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "empty"
    if isinstance(value, float):
        return f"{value:g}"
    if dataclasses.is_dataclass(value):
        return type(value).__name__
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "_")
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else str(value)


def page() -> Iterator[str]:
    """Yield docs/settings.md."""
    from rlhf_pipeline.config import Pipeline, PretrainedPolicy, TinyPolicy
    from rlhf_pipeline.data.prompts import CopyDigits, Curriculum, Mix, Prompts
    from rlhf_pipeline.settings import settings_of

    yield "# Settings"
    yield ""
    yield "This page describes every field of a definition. It is generated from the declarations of the fields by"
    yield "`rlhf-pipeline config --markdown > docs/settings.md`. Set a field in the definition"
    yield "(`learn=Learn(lr=3e-4)`), or on the command line with `--set learn.lr=3e-4`."
    yield "`rlhf-pipeline config learn.lr` shows one field; `rlhf-pipeline config copy_digits` shows the values in"
    yield "the definition `copy_digits`."
    whole = settings_of(Pipeline)
    yield from _section("Pipeline", Pipeline, "", [item for item in whole if not item.groups or item.name == "replay"])
    sections: list[tuple[str, type]] = [("policy", TinyPolicy), ("policy", PretrainedPolicy)]
    sections += [("prompts", CopyDigits), ("prompts", Prompts), ("prompts", Mix)]
    sections += [("prompts.curriculum", Curriculum)]
    for item in whole:
        for group in item.groups if item.name != "policy" else ():
            sections.append((item.name, group))
            sections += [(f"{item.name}.{part.name}", inner) for part in settings_of(group) for inner in part.groups]
    for name, kind in sections:
        yield from _section(f"{name}: {kind.__name__}", kind, f"{name}.", list(settings_of(kind)))


def _section(title: str, kind: type, prefix: str, items: list[Any]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ").strip()
    yield ""
    yield "| field | default | allowed values | meaning |"
    yield "|---|---|---|---|"
    for item in items:
        cells = (f"`{prefix}{item.name}`", f"`{_default(item)}`", item.kind(quote="`"), item.help)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
