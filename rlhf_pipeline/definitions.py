"""Finds and loads pipeline definitions by name or by file, with helpful errors.

A definition is a public function without arguments that is annotated `-> Pipeline`. The built-in ones are files in the
`pipelines/` folder of a checkout; an installed wheel carries the same files as data. That folder is never imported:
each file is run by path, like a user's own. Nothing here imports torch.

>>> definition = find("copy_digits")
>>> definition.name
'copy_digits'
>>> definition.pipeline([("learn.lr", "3e-4")]).learn.lr
0.0003
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.config_text import override, override_all
from rlhf_pipeline.errors import DefinitionError, MissingPathError, did_you_mean, no_such_field

Overrides = Sequence[tuple[str, str]]

_UNKNOWN_FIELD = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")
_MISSING_FIELD = re.compile(r"(\w+)\.__init__\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """One function that returns a `Pipeline`, found but not called yet."""

    name: str
    """The argument of `rlhf-pipeline run`: a built-in name, or `/abs/file.py:function`."""
    function: str
    file: Path
    build: Callable[[], Any]

    def pipeline(self, overrides: Overrides = ()) -> Pipeline:
        """Call the function and apply `--set` overrides."""
        try:
            pipeline = self.build()
        except Exception as error:
            raise _explain(error, self.file, f"{self.function}()") from error
        if not isinstance(pipeline, Pipeline):
            raise DefinitionError(
                f"{self.file}: {self.function}() returned {_shortened(pipeline)}; it must return a Pipeline. "
                "Import it (`from rlhf_pipeline import Pipeline`), and end the function with `return Pipeline(...)`."
            )
        return apply_overrides(pipeline, overrides)


def apply_overrides(pipeline: Pipeline, overrides: Overrides) -> Pipeline:
    """Apply overrides in any order in which they are valid, or together if no single one is."""
    waiting = list(overrides)
    while waiting:
        refused: list[tuple[tuple[str, str], DefinitionError]] = []
        for path, text in waiting:
            try:
                pipeline = override(pipeline, path, text, function_in)
            except DefinitionError as error:
                refused.append(((path, text), error))
        if len(refused) == len(waiting):
            with contextlib.suppress(DefinitionError):
                return override_all(pipeline, waiting, function_in)  # valid only together
            (path, text), error = refused[0]
            raise DefinitionError(f"--set {path}={text}: {error}") from error
        waiting = [pair for pair, _ in refused]
    return pipeline


def function_in(text: str) -> Callable[..., Any]:
    """Return the function that `FILE.py:NAME` names; the file is run, unless it was before."""
    name, _, function = text.rpartition(":")
    file = Path(name).expanduser()
    loaded = _LOADED.get(_module_name(file.resolve()))
    module = load_module(file) if loaded is None else loaded
    member = getattr(module, function, None)
    if not callable(member):
        function_names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise DefinitionError(f"{file} has no function '{function}'.{did_you_mean(function, function_names)}")
    return member


def builtin_folder() -> Path:
    """Return the folder of the built-in definitions: the wheel's copy, or `pipelines/` of a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_pipelines"
    return installed if installed.is_dir() else package.parent / "pipelines"


def builtin_files() -> list[Path]:
    """Return the built-in definition files in alphabetical order."""
    return [file for file in _builtin_folder_files() if _may_define(file)]


def builtin_programs() -> list[Path]:
    """Return the files of the built-in folder that define no pipeline and are run with `python FILE`."""
    return [file for file in _builtin_folder_files() if not _may_define(file)]


def _builtin_folder_files() -> list[Path]:
    return sorted(file for file in builtin_folder().glob("*.py") if not file.name.startswith("_"))


def _may_define(file: Path) -> bool:
    """Return whether a built-in file has a definition, judging by its text: running a program imports torch."""
    return re.search(r"->\s*['\"]?[\w.]*Pipeline\b", file.read_text(encoding="utf-8")) is not None


def find(spec: str) -> Definition:
    """Return the definition that `NAME` or `FILE.py[:function]` refers to."""
    file_text, _, function = spec.rpartition(":") if re.search(r":\w*$", spec) else (spec, "", "")
    if file_text.endswith(".py") or "/" in file_text:
        return _from_file(Path(file_text).expanduser(), function, spec)
    return _builtin(spec)


def definitions_in(file: Path) -> list[Definition]:
    """Return all definitions of one Python file, in source order."""
    module = load_module(file)
    is_builtin = file.resolve().parent == builtin_folder()
    definitions = [
        Definition(
            name=function.__name__ if is_builtin else f"{file.resolve()}:{function.__name__}",
            function=function.__name__,
            file=file,
            build=function,
        )
        for function in vars(module).values()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and _is_definition(function)
    ]
    return sorted(definitions, key=lambda item: inspect.unwrap(item.build).__code__.co_firstlineno)


def load_module(file: Path) -> ModuleType:
    """Run a Python file by path and return it as a module.

    The module's name comes from the file's, so `config.json` does not depend on the file's location. A user's file may
    import modules from its own folder.
    """
    if not file.is_file():
        raise MissingPathError(_no_such_file(file))
    path = file.resolve()
    # Appended, not inserted first: a helper named like an installed package must not hide it.
    if path.parent != builtin_folder() and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise DefinitionError(f"{file} is not a Python file. Definitions end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a module up by its name while it runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise _explain(error, file, "the file") from error
    _LOADED[name] = module
    share_with_workers()
    return module


_LOADED: dict[str, ModuleType] = {}
"""Modules run by path, which other processes cannot import by name."""


def share_with_workers() -> None:
    """Make functions of files that were run by path available to other processes.

    cloudpickle sends such a function by name by default, without its code. This is a no-op until cloudpickle has been
    imported, and is called again once torchrl has imported it.
    """
    cloudpickle = sys.modules.get("cloudpickle")
    if cloudpickle is not None:
        for module in _LOADED.values():
            cloudpickle.register_pickle_by_value(module)


def _module_name(path: Path) -> str:
    """Return `definition_STEM`, with a number if another file of that stem is loaded."""
    base = name = "definition_" + re.sub(r"\W", "_", path.stem)
    for number in range(2, len(_LOADED) + 3):
        loaded = _LOADED.get(name)
        if loaded is None or loaded.__file__ == str(path):
            return name
        name = f"{base}_{number}"
    return name


def _is_definition(function: Callable[..., Any]) -> bool:
    if function.__name__.startswith("_"):
        return False
    annotation = function.__annotations__.get("return")
    by_text = annotation.strip("'\"").rpartition(".")[2] == "Pipeline" if isinstance(annotation, str) else False
    return (by_text or annotation is Pipeline) and _takes_nothing(function)


def _takes_nothing(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _from_file(file: Path, function: str, spec: str) -> Definition:
    if file.is_dir():
        raise DefinitionError(f"{file} is a folder. Specify a Python file in it: {file}/FILE.py[:function].")
    definitions = definitions_in(file)
    if not function:
        return _the_only_one(definitions, file)
    for definition in definitions:
        if definition.function == function:
            return definition
    # A function requested by name needs no annotation; its result is checked.
    member = getattr(_LOADED[_module_name(file.resolve())], function, None)
    if inspect.isfunction(member) and _takes_nothing(member):
        return Definition(name=f"{file.resolve()}:{function}", function=function, file=file, build=member)
    if inspect.isfunction(member):
        raise DefinitionError(
            f"{file}: {function}{inspect.signature(member)} takes arguments, but a definition must not. Write a "
            f"function that calls {function} and takes no arguments."
        )
    names = [definition.function for definition in definitions]
    hint = did_you_mean(function, names) if names else _HOW_TO_DEFINE
    raise DefinitionError(f"{file} has no function '{function}'.{hint}")


_HOW_TO_DEFINE = " A definition looks like `def my_task() -> Pipeline: return Pipeline(...)`."


def _the_only_one(definitions: list[Definition], file: Path) -> Definition:
    if not definitions:
        raise DefinitionError(
            f"{file} has no function that is annotated `-> Pipeline` and takes no arguments.{_HOW_TO_DEFINE} If the "
            f"file is a program, run it with: python {file}"
        )
    for definition in definitions:
        if len(definitions) == 1 or definition.function == file.stem:
            return definition
    names = ", ".join(definition.function for definition in definitions)
    raise DefinitionError(
        f"{file} has {len(definitions)} definitions ({names}). Choose one: {file}:{definitions[0].function}"
    )


def _builtin(name: str) -> Definition:
    files = builtin_files()
    for file in files:
        if file.stem == name:
            return _the_only_one(definitions_in(file), file)
    built_in: set[str] = {file.stem for file in files}
    for file in files:
        for definition in _definitions_or_none(file):
            if definition.function == name:
                return definition
            built_in.add(definition.function)
    for file in builtin_programs():
        if file.stem == name:
            raise DefinitionError(f"'{name}' is a program, not a definition. Run it with: python {file}")
    beside = Path(f"{name}.py")
    if beside.is_file():
        raise DefinitionError(f"there is no built-in pipeline '{name}'. For the local file, type ./{beside}")
    raise DefinitionError(
        f"there is no pipeline '{name}'.{did_you_mean(name, built_in)} `rlhf-pipeline list` shows all of them. To use "
        "your own definition, specify FILE.py[:function]."
    )


@functools.cache
def _definitions_or_none(file: Path) -> tuple[Definition, ...]:
    """Return a built-in file's definitions; one broken file must not hide the names in the others."""
    try:
        return tuple(definitions_in(file))
    except DefinitionError:
        return ()


def _no_such_file(file: Path) -> str:
    near = [path.name for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
    if not file.parent.is_dir():
        return f"there is no file {file}: the folder {file.parent} does not exist."
    if not near:
        return f"there is no file {file}, and no other Python file in {file.parent.resolve()}."
    return f"there is no file {file}.{did_you_mean(file.name, near)}"


def _explain(error: BaseException, file: Path, what: str) -> DefinitionError:
    """Return a `DefinitionError` with the position of `error` in the user's file and the fix."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename) == file.resolve():
        return DefinitionError(f"{file}:{error.lineno}: {error.msg}: {(error.text or '').strip()!r}")
    line = _line_in(error.__traceback__, file.resolve())
    where = f"{file}:{line}" if line else str(file)
    if isinstance(error, DefinitionError):
        return DefinitionError(f"{error} ({where})")
    text = str(error)
    unknown, missing = _UNKNOWN_FIELD.match(text), _MISSING_FIELD.match(text)
    if isinstance(error, TypeError) and unknown:
        owner, name = unknown.groups()
        hint = no_such_field(name, _fields_of(owner, error.__traceback__))
        return DefinitionError(f"{owner} has no field '{name}'.{hint} ({where})")
    if isinstance(error, TypeError) and missing:
        owner, names = missing.groups()
        return DefinitionError(f"{owner} needs {names}. ({where})")
    if isinstance(error, ModuleNotFoundError) and error.name:
        return DefinitionError(
            f"{where}: there is no module '{error.name}'. Install it for this Python ({sys.executable} -m pip "
            f"install ...), or place {error.name}.py in the folder of {file.name}."
        )
    if isinstance(error, SystemExit):
        return DefinitionError(
            f"{where}: {what} stops the process (SystemExit). Move its code under `if __name__ == '__main__':`."
        )
    return DefinitionError(f"{where}: {what} raised {type(error).__name__}: {text}")


def _line_in(tb: TracebackType | None, path: Path) -> int | None:
    """Return the line of the innermost frame in the user's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(tb) if Path(frame.filename) == path]
    return lines[-1] if lines else None


def _fields_of(class_name: str, tb: TracebackType | None) -> list[str]:
    """Return the arguments of a class, looked up in the failing frame, or in this package."""
    import rlhf_pipeline

    scopes: list[Mapping[str, Any]] = [vars(rlhf_pipeline)]
    while tb is not None:
        scopes.insert(0, tb.tb_frame.f_globals)
        tb = tb.tb_next
    for scope in scopes:
        member = scope.get(class_name)
        if inspect.isclass(member):
            return [name for name in inspect.signature(member).parameters if name != "self"]
    return []


def _shortened(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
