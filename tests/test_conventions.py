"""What the project asks of itself, checked."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

import rlhf_pipeline
import trajectory_store
from rlhf_pipeline.cli.parser import COMMANDS
from tests.binding_names import FILLERS, SYNONYMS, bindings, counts

ROOT = Path(__file__).resolve().parents[1]


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(_text(path)) for path in (ROOT / "rlhf_pipeline").rglob("*.py")}


def test_every_test_has_a_docstring():
    """Each test function has a docstring."""
    silent = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert not silent, silent


def test_public_names_are_complete_sorted_and_importable():
    """`__all__` is sorted, every name resolves, and the frozen names of the design can be imported."""
    for package in (rlhf_pipeline, trajectory_store):
        names = package.__all__
        assert sorted(names) == sorted(set(names))
        for name in names:
            assert getattr(package, name) is not None
    frozen = {
        "TrajectoryStorage", "TrajectoryReplayBuffer", "MCAdvantage", "RetrieveLogProb", "KLRewardTransform",
        "ConstantKLController", "AdaptiveKLController", "GRPOLoss", "GRPOLossOutput", "CausalLMPolicy", "Pipeline",
        "Collector", "Learner",
        "RolloutFromModel", "group_advantage", "kl_k1", "kl_k2", "kl_k3", "Tokens", "Masks", "ChatHistory",
        "LogProbs", "Text", "LogProbDistribution", "LLMWrapperBase",
    }  # fmt: skip
    assert frozen | set(rlhf_pipeline.__all__) <= set(dir(rlhf_pipeline))
    for name in dir(rlhf_pipeline):
        assert getattr(rlhf_pipeline, name) is not None
    assert {"TrajectoryStore", "Schema", "Column", "StoreError"} <= set(trajectory_store.__all__)


def test_what_is_exported_or_named_in_docs_is_documented():
    """A name that users meet has a docstring, and so has each public method that its class adds; no linter asks.

    A method that stands for one of a base class or a protocol is documented there.
    """
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "storage").glob("*.md")]
    named = set(re.findall(r"`(?:[\w.]*\.)?(\w+)(?:\([^`]*\))?`", "".join(map(_text, pages))))
    met = {*dir(rlhf_pipeline), *trajectory_store.__all__} | named
    trees = _trees() | {path: ast.parse(_text(path)) for path in (ROOT / "storage").rglob("*.py")}
    known = [node for tree in trees.values() for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    documented = {
        method.name
        for node in known
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }
    silent = []
    for node in (node for node in known if node.name in met and not node.name.startswith("_")):
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")]
        silent += [] if ast.get_docstring(node) else [node.name]
        if isinstance(node, ast.ClassDef):
            silent += [
                f"{node.name}.{method.name}"
                for method in methods
                if not ast.get_docstring(method)
                and not (node.bases and method.name in documented)
                and not any(ast.unparse(one).endswith(".setter") for one in method.decorator_list)
            ]
    assert not silent, silent


def test_modules_with_an_underscore_stay_in_their_package():
    """What another package imports has no leading underscore."""
    found: list[str] = []
    for path, tree in _trees().items():
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlhf_pipeline."):
                package, _, module = (node.module or "").rpartition(".")
                if module.startswith("_") and package != own:
                    found.append(f"{path.relative_to(ROOT)} imports {node.module}")
    assert not found, found


def test_a_module_name_has_one_meaning():
    """Only a command is called as the module that does its work, and what is remote as what is local.

    Both packages have `errors`. And there are `files` of a run, and those that people bring.
    """
    found = [path for package in ("rlhf_pipeline", "storage") for path in (ROOT / package).rglob("*.py")]
    rooms: dict[str, list[str]] = {"commands": [], "remote": [], "objects": [], "local": []}
    for path in (path for path in found if not path.name.startswith("__")):
        name, room = path.stem.lstrip("_"), path.parent.name
        if room == "cli":
            room = "commands" if name.rstrip("_").replace("_", "-") in COMMANDS else "local"
        rooms[room if room in rooms else "local"].append(name)
    for room, names in rooms.items():
        allowed = {"errors", "files"} if room == "local" else set[str]()
        assert {name for name in names if names.count(name) > 1} == allowed, room
    assert {*rooms["local"]} & {*rooms["remote"], *rooms["objects"]} == {"backend", "rollouts", "rows"}


def test_a_class_name_has_one_meaning():
    """No two classes of the project, private ones and those of the store included, have the same name."""
    places: dict[str, list[str]] = {}
    for package in ("rlhf_pipeline", "storage"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(_trees().get(path) or ast.parse(_text(path))):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


SHARES: dict[str, dict[str, float]] = {
    "rlhf_pipeline": {
        "data": 0.1253, "info": 0.0376, "item": 0.4929, "others": 0.0459, "result": 0.0418, "results": 0.0125,
        "value": 1.0860,
    },
    "storage/trajectory_store": {
        "data": 0.6478, "info": 0.0125, "item": 0.1993, "others": 0.0249, "result": 0.0374, "value": 0.8471,
    },
}  # fmt: skip
"""In percent of all bindings, measured at commit 9eeb811, before fillers were renamed; other synonyms were not used."""


@pytest.mark.parametrize("package", SHARES)
def test_names_state_what_a_value_is(package: str):
    """Fewer than 0.3 % are fillers, at most one in a file of up to 200 lines; no synonym is more frequent than before.

    `python -m tests.binding_names PACKAGE` prints the places. Peers have 0.0 to 0.2 %.
    """
    total, by_word = len(bindings(ROOT / package)), counts(ROOT / package)
    fillers = [binding for binding in bindings(ROOT / package) if binding.word in FILLERS]
    assert len(fillers) < 0.003 * total, fillers
    by_file = Counter(binding.path for binding in fillers)
    several = [path for path, count in by_file.items() if count > 1 and len(_text(path).splitlines()) <= 200]
    assert not several, [binding for binding in fillers if binding.path in several]
    shares = {word: 100 * by_word[word] / total for word in SYNONYMS}
    assert not {word: share for word, share in shares.items() if share > SHARES[package].get(word, 0.0)}


def test_a_filler_is_counted_wherever_a_name_is_given(tmp_path: Path):
    """A parameter, a variable, an attribute, a function, a class, an exception and the target of a loop or a `with`."""
    (tmp_path / "code.py").write_text(
        "class Found:\n"
        "    def given(self, other, *, row=0):\n"
        "        self._known: int = row\n"
        "        one = [made for made in other]\n"
        "        with row as held, row as (seen, _):\n"
        "            shown += one.named\n"
        "        try:\n"
        "            pass\n"
        "        except OSError as said:\n"
        "            return (taken := said)\n"
    )
    words = [binding.word for binding in bindings(tmp_path) if binding.word in FILLERS]
    named = ["found", "given", "held", "known", "made", "one", "other", "said", "seen", "shown", "taken"]
    assert sorted(words) == named


def test_private_attributes_of_tensordict_are_touched_in_one_module():
    """Where another library's objects are read past their public names, `data/tensordicts.py` does it.

    The rest: a hook of TorchRL's buffer that has no other way, and settings of transformers and argparse.
    """
    allowed = {
        "data/tensordicts.py": {"_tensordict", "_new_unsafe"},
        "buffer/storage.py": {"_init_collate_fn"},
        "policies/attention_name.py": {"_attn_implementation"},
        "learner/optimizer.py": {"_foreach_copy_", "_foreach_mul_"},  # documented functions of torch
        "cli/parser.py": {"_SubParsersAction", "_actions"},
        "run/processes/heartbeat.py": {"_exit"},  # of os: public
    }
    package, trees = ROOT / "rlhf_pipeline", _trees()
    own = {"_replace", "_fields", "_asdict"}  # of named tuples, where they are public
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                own.add(node.attr)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                own |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = [
        f"{path.relative_to(package)}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match("_[^_]", node.attr)
        and not _is_self(node.value)
        and node.attr not in own | allowed.get(str(path.relative_to(package)), set())
        and ast.unparse(node.value) != "ReplayBuffer"  # the class above ours
    ]
    assert not found, found


def test_every_formula_is_the_one_that_runs():
    """Each public function of `functional` is called by the package itself: no tested copy beside the one in use."""
    trees = _trees()
    used = {
        name
        for tree in trees.values()
        for node in ast.walk(tree)
        for name in (getattr(node, "id", None), getattr(node, "attr", None))
        if isinstance(name, str)
    }
    formulas = {
        node.name
        for path, tree in trees.items()
        if path.parent.name == "functional"
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    offered = {"turn_advantage"}  # for programs of one's own: a run learns from one advantage per conversation
    assert not formulas - used - offered, formulas - used - offered


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_ci_runs_the_readmes_test_command():
    """The README has one command for the main job and one for the tests, and CI takes the latter from it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python3 -m venv .*$", readme, flags=re.MULTILINE)
    assert [command.split("&&")[-1].split()[0] for command in commands] == [
        ".venv/bin/rlhf-pipeline",
        ".venv/bin/pytest",
    ]
    assert "README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_marks_are_in_the_files_of_their_tests():
    """`.ci/run` looks for them there."""
    marked = [
        path for path in (ROOT / "tests").rglob("*.py") if re.search(r"mark\.(slow|crash|peer|bench)\b", _text(path))
    ]
    assert [path.name for path in marked if not path.name.startswith("test_")] == []
    assert len(marked) > 40


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_paths_in_commands_are_typed_by_one_function():
    """Quoting is in one place, and no printed command has a bare path in it."""
    quoting, bare = set[str](), list[str]()
    for file in sorted((ROOT / "rlhf_pipeline").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        quoting |= {file.name} if re.search(r"\bshlex\b", text) else set()
        ready = {"typed", *re.findall(r"(\w+) = typed\(", text)}
        found = re.findall(r"rlhf-pipeline [a-z-]+ (?:--\w+ )*\{(\w+)", text)
        bare += [f"{file.name}: {name}" for name in found if name not in ready]
    assert quoting == {"errors.py"}
    assert bare == []


def test_no_module_needs_one_that_needs_it():
    """Imports make no circle, those inside functions included; what only annotations need does not count."""
    store = {path: ast.parse(_text(path)) for path in (ROOT / "storage" / "trajectory_store").rglob("*.py")}
    trees = _trees() | store
    needs: dict[str, set[str]] = {_module(path): set() for path in trees}
    for path, tree in trees.items():
        annotations = {
            node for test in ast.walk(tree) if _is_for_annotations(test) for one in test.body for node in ast.walk(one)
        }
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node not in annotations):
            named = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
            needs[_module(path)] |= named & needs.keys() - {_module(path), "rlhf_pipeline", "trajectory_store"}
    reached, before = {name: set(above) for name, above in needs.items()}, {}
    while reached != before:
        reached, before = (
            {name: above.union(*(reached[one] for one in above)) for name, above in reached.items()},
            reached,
        )
    circles = {
        name: sorted(one for one in above if name in reached[one])
        for name, above in needs.items()
        if name in reached[name]
    }
    assert not circles, circles


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("storage.").removesuffix(".__init__")


def _is_for_annotations(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
