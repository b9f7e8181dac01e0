"""Finding and loading definitions."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_pipeline import definitions
from rlhf_pipeline.config import Pipeline
from rlhf_pipeline.errors import DefinitionError, MissingPathError

IMPORTS = """from __future__ import annotations

from rlhf_pipeline import Collect, CopyDigits, Pipeline, TinyPolicy, token_match

"""
BODY = 'Pipeline(name="mine", policy=TinyPolicy(), prompts=CopyDigits(), reward=token_match{})'


def write(folder: Path, text: str, name: str = "task.py") -> Path:
    """Write a definition file."""
    file = folder / name
    file.write_text(IMPORTS + text)
    return file


def one(extra: str = "", name: str = "mine") -> str:
    """Return the text of one definition, its body on line 6 of the file."""
    return f"def {name}() -> Pipeline:\n    return {BODY.format(extra)}\n"


def test_builtin_by_name():
    """A built-in definition is found by its name and builds a Pipeline."""
    definition = definitions.find("copy_digits")
    assert definition.name == definition.function == "copy_digits"
    assert isinstance(definition.pipeline(), Pipeline)


def test_every_builtin_file_loads():
    """Each file of the built-in folder holds at least one definition, and each of them builds."""
    files = definitions.builtin_files()
    assert {"copy_digits", "gsm8k"} <= {file.stem for file in files}
    assert [file.stem for file in definitions.builtin_programs()] == ["grpo_in_one_page"]
    with pytest.raises(DefinitionError, match=r"is a program, not a definition. Run it with: python .*one_page\.py"):
        definitions.find("grpo_in_one_page")
    for file in files:
        found = definitions.definitions_in(file)
        assert found
        for definition in found:
            assert definition.pipeline().description
            assert definitions.find(definition.name).function == definition.function


def test_builtin_folder_of_a_wheel(tmp_path: Path):
    """An installed wheel has the definitions in a data folder inside the package."""
    package = tmp_path / "rlhf_pipeline"
    shutil.copytree(Path(definitions.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "_pipelines").mkdir()
    write(package / "_pipelines", one(name="wheel_task"), "wheel_task.py")
    code = "from rlhf_pipeline import definitions as d; print(d.find('wheel_task').name, d.builtin_folder().name)"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True, env={"PYTHONPATH": "."}
    )
    assert shown.stdout.split() == ["wheel_task", "_pipelines"]


def test_unknown_name():
    """An unknown name names the nearest one and the command that lists all."""
    with pytest.raises(DefinitionError, match=r"'copy_digit'\. Did you mean 'copy_digits'\? `rlhf-pipeline list`"):
        definitions.find("copy_digit")


def test_name_of_a_file_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A bare name that is a file here is answered with how to name the file."""
    write(tmp_path, one())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DefinitionError, match=r"type \./task\.py"):
        definitions.find("task")


def test_file_with_one_definition(tmp_path: Path):
    """A file with one definition needs no function name, and its full name holds the absolute path."""
    file = write(tmp_path, one() + "\n\ndef _private() -> Pipeline:\n    raise OSError\n")
    definition = definitions.find(str(file))
    assert definition.name == f"{file.resolve()}:mine"
    assert definition.pipeline().name == "mine"
    assert definitions.find(definition.name).function == "mine"


def test_file_with_two_definitions(tmp_path: Path):
    """With two definitions the function must be named, unless one has the file's name."""
    file = write(tmp_path, one(name="first") + "\n\n" + one(name="second"))
    with pytest.raises(DefinitionError, match=r"has 2 definitions \(first, second\)\. Choose one: .*task\.py:first"):
        definitions.find(str(file))
    assert definitions.find(f"{file}:second").function == "second"
    file = write(tmp_path, one(name="first") + "\n\n" + one(name="both"), "both.py")
    assert definitions.find(str(file)).function == "both"


def test_imported_functions_are_no_definitions(tmp_path: Path):
    """A definition imported from a file beside it is not the file's own, and the import works."""
    write(tmp_path, one(name="theirs"), "other_task_file.py")
    file = write(tmp_path, "from other_task_file import theirs\n\n\n" + one(name="ours"))
    assert [d.function for d in definitions.definitions_in(file)] == ["ours"]


def test_unknown_function(tmp_path: Path):
    """A function that the file lacks names the nearest one."""
    file = write(tmp_path, one())
    with pytest.raises(DefinitionError, match=r"has no function 'mime'\. Did you mean 'mine'\?"):
        definitions.find(f"{file}:mime")


def test_no_definition_in_file(tmp_path: Path):
    """A file without a definition is told what one looks like."""
    with pytest.raises(DefinitionError, match=r"annotated `-> Pipeline`.*def my_task\(\)"):
        definitions.find(str(write(tmp_path, "x = 1\n")))


def test_function_with_arguments(tmp_path: Path):
    """A function that takes arguments is refused with its signature."""
    file = write(tmp_path, "def mine(size: int) -> Pipeline:\n    raise OSError\n")
    with pytest.raises(DefinitionError, match=r"mine\(size: 'int'\).*takes arguments"):
        definitions.find(f"{file}:mine")


def test_function_without_annotation(tmp_path: Path):
    """A function without the annotation works when it is asked for by name."""
    file = write(tmp_path, one().replace(" -> Pipeline", ""))
    assert definitions.find(f"{file}:mine").pipeline().name == "mine"


def test_missing_file(tmp_path: Path):
    """A missing file names the nearest one; a missing folder is said."""
    write(tmp_path, one())
    with pytest.raises(MissingPathError, match=r"no file .*taks\.py\. Did you mean 'task\.py'\?"):
        definitions.find(str(tmp_path / "taks.py"))
    with pytest.raises(MissingPathError, match=r"the folder .*nowhere does not exist"):
        definitions.find(str(tmp_path / "nowhere" / "task.py"))
    with pytest.raises(DefinitionError, match="is a folder"):
        definitions.find(f"{tmp_path}/")


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("x = 1 / 0\n", r"task\.py:5: the file raised ZeroDivisionError: division by zero"),
        ("def f(:\n    pass\n", r"task\.py:5: invalid syntax: 'def f\(:'"),
        ("import not_a_module_here\n", r"task\.py:5: there is no module 'not_a_module_here'\. Install it"),
        ("raise SystemExit(3)\n", r"task\.py:5: the file stops the process.*__main__"),
    ],
)
def test_file_that_raises(tmp_path: Path, text: str, pattern: str):
    """A file that cannot be run says where and why."""
    with pytest.raises(DefinitionError, match=pattern):
        definitions.find(str(write(tmp_path, text)))


def test_function_that_raises(tmp_path: Path):
    """A definition that raises says where and why."""
    file = write(tmp_path, "def mine() -> Pipeline:\n    return undefined_name\n")
    with pytest.raises(DefinitionError, match=r"task\.py:6: mine\(\) raised NameError: name 'undefined_name'"):
        definitions.find(str(file)).pipeline()


def test_function_that_returns_something_else(tmp_path: Path):
    """What came back instead of a Pipeline is shown."""
    file = write(tmp_path, "def mine() -> Pipeline:\n    return {'steps': 3}\n")
    with pytest.raises(DefinitionError, match=r"mine\(\) returned dict \{'steps': 3\}; it must return a Pipeline"):
        definitions.find(str(file)).pipeline()


def test_unknown_field(tmp_path: Path):
    """An unknown field names the nearest one and the line it is on."""
    file = write(tmp_path, one(", collect=Collect(group_sise=4)"))
    with pytest.raises(DefinitionError) as caught:
        definitions.find(str(file)).pipeline()
    assert str(caught.value) == f"Collect has no field 'group_sise'. Did you mean 'group_size'? ({file}:6)"


def test_missing_field(tmp_path: Path):
    """A required field that is not given is named with its line."""
    file = write(tmp_path, one().replace("policy=TinyPolicy(), ", ""))
    with pytest.raises(DefinitionError, match=r"Pipeline needs 'policy'\. \(.*task\.py:6\)"):
        definitions.find(str(file)).pipeline()


def test_value_out_of_range(tmp_path: Path):
    """A value that a dataclass refuses gets the line it is on."""
    file = write(tmp_path, one(", collect=Collect(group_size=0)"))
    with pytest.raises(DefinitionError, match=r"group_size is 0; it must be at least 1\. \(.*task\.py:6\)"):
        definitions.find(str(file)).pipeline()


def test_overrides():
    """Overrides are applied by type, in any order in which they are valid."""
    definition = definitions.find("copy_digits")
    pipeline = definition.pipeline([("learn.epochs", "4"), ("buffer.max_staleness", "3")])
    assert (pipeline.learn.epochs, pipeline.buffer.max_staleness) == (4, 3)
    with pytest.raises(DefinitionError, match=r"^--set learn\.lrr=1: Learn has no field 'lrr'\. Did you mean 'lr'\?"):
        definition.pipeline([("learn.lrr", "1")])
    with pytest.raises(DefinitionError, match=r"^--set sample\.batch_size=4: .*so sample\.batch_size cannot be set"):
        definition.pipeline([("sample.batch_size", "4")])


def test_two_files_of_one_name(tmp_path: Path):
    """Two files with the same name keep a module each, and running a file again reuses its name."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = definitions.load_module(write(tmp_path / "a", one(), "same_name.py"))
    second = definitions.load_module(write(tmp_path / "b", one(), "same_name.py"))
    again = definitions.load_module(tmp_path / "a" / "same_name.py")
    assert (first.__name__, second.__name__) == ("definition_same_name", "definition_same_name_2")
    assert again.__name__ == first.__name__


def test_functions_travel_to_another_process(tmp_path: Path):
    """Cloudpickle sends the code of a file that was run by path, so a fresh process can call it."""
    cloudpickle = pytest.importorskip("cloudpickle")
    file = write(tmp_path, "def score(p, c, a, m):\n    return len(c) + 0.5\n\n\n" + one())
    module = definitions.load_module(file)
    definitions.share_with_workers()
    payload = tmp_path / "payload"
    payload.write_bytes(cloudpickle.dumps(module.score))
    code = f"import pickle; print(pickle.load(open({str(payload)!r}, 'rb'))('', 'abc', None, dict()))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "3.5"
