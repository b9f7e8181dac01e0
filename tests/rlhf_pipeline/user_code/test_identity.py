"""What identifies a user's function: what decides its results changes its identity, and nothing else does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib.util
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf_pipeline import Matches, token_match
from rlhf_pipeline.user_code import identity
from rlhf_pipeline.user_code.identity import NOT_OBSERVED, changed_parts, identity_of

GRADER = '''\
"""A grader and everything that it is made of."""
import functools
import re
from words import points
import package.rules

def decorate(function):
    @functools.wraps(function)
    def inner(*given):
        return function(*given)
    return inner

class Helper:
    extra = 1.0
    def __init__(self, amount):
        self.amount = amount
    def add(self, value):
        return value + self.amount + self.extra

class Base:
    base = 2.0
    def lowest(self):
        return FLOOR

class Grader(Base):
    weight = 3.0
    __slots__ = ("kept",)
    def __init__(self, w, helper=None):
        self.kept = w
    @property
    def factor(self):
        return self.kept
    def __call__(self, completion):
        return self.factor * points(completion)
    def grade(self, completion):
        return self.factor

class Open:
    def __init__(self, **given):
        vars(self).update(given)
    def __call__(self, completion):
        return 1.0
    def grade(self, completion):
        return 2.0

FLOOR = 0.5
TABLE = {}
TABLE["a"] = 1
UNUSED = 7

def share(value):
    return value * FLOOR + TABLE["a"]

def unused():
    return UNUSED

def plain(completion, w=1.0, *, more=2.0):
    from package import late
    return share(w * len(completion)) + late.AMOUNT

@decorate
def decorated(completion):
    return 1.0

def closure(captured):
    def reward(completion):
        return captured
    return reward

def ruled(completion):
    return package.rules.judge(completion)

first, second = (lambda completion: 1.0), (lambda completion: 2.0)

def definition():
    return "a definition, which names plain and is not part of it"
'''
WORDS = "from package.deep import level\ndef points(text):\n    return float(len(text)) * level()\n"
FILES = {
    "grader.py": GRADER,
    "words.py": WORDS,
    "package/__init__.py": "",
    "package/deep.py": "from .deeper import LEVEL\ndef level():\n    return LEVEL\n",
    "package/deeper.py": "LEVEL = 1.0\n",
    "package/rules.py": "def judge(text):\n    return 1.0\n",
    "package/late.py": "AMOUNT = 1.0\n",
}


@pytest.fixture
def load(tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """Return a function that writes the files, some of them edited, and loads the grader as a definition is loaded."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def loaded(**edits: tuple[str, str]) -> Any:
        for name, text in FILES.items():
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            before, now = edits.get(name.removesuffix(".py").replace("/", "_"), ("", ""))
            assert before in text
            file.write_text(text.replace(before, now, 1) if before else text)
        return module_of(tmp_path / "grader.py")

    yield loaded
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("definition_grader", "words", "package")]:
        del sys.modules[name]


def module_of(file: Path) -> Any:
    forget()
    linecache.checkcache()
    importlib.invalidate_caches()
    spec = importlib.util.spec_from_file_location("definition_grader", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["definition_grader"] = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True  # a file that is edited within a second has no other time
    spec.loader.exec_module(module)
    return module


def parts(part: Any) -> dict[str, str]:
    return identity_of(part)


SOURCES = {
    "its source": ("plain", ("grader", ("w * len", "2 * w * len")), ["source has changed"]),
    "its default in the text": ("plain", ("grader", ("w=1.0", "w=1.5")), ["default w was 1.0 and is now 1.5"]),
    "a function that it names": ("plain", ("grader", ("value * FLOOR", "value + FLOOR")), ["source of share has"]),
    "a value that this one names": ("plain", ("grader", ("FLOOR = 0.5", "FLOOR = 0.6")), ["source of FLOOR has"]),
    "a value that is changed in place": ("plain", ("grader", ('["a"] = 1', '["a"] = 2')), ["source of TABLE has"]),
    "a module that it imports when it runs": ("plain", ("package_late", ("1.0", "1.5")), ["module package.late has"]),
    "a module of its file": ("ruled", ("package_rules", ("1.0", "1.5")), ["module package.rules has changed"]),
    "a module of that module": ("Grader", ("package_deeper", ("1.0", "1.5")), ["module package.deeper has changed"]),
    "where a name comes from": (
        "Grader",
        ("grader", ("words import points", "package.deep import level as points")),
        ["imports has changed", "module words is gone"],
    ),
    "a method": ("Grader", ("grader", ("return self.factor * ", "return 2 * ")), ["source has changed"]),
    "a base class": ("Grader", ("grader", ("return FLOOR", "return -FLOOR")), ["source of Base has changed"]),
    "an attribute of its class": (
        "Grader",
        ("grader", ("weight = 3.0", "weight = 4.0")),
        ["attribute Grader.weight was 3.0 and is now 4.0"],
    ),
    "an attribute of its base": (
        "Grader",
        ("grader", ("base = 2.0", "base = 4.0")),
        ["attribute Base.base was 2.0 and is now 4.0"],
    ),
    "a decorated function": (
        "decorated",
        ("grader", ("def decorated(completion):\n    return 1.0", "def decorated(completion):\n    return 3.0")),
        ["source has changed"],
    ),
    "a decorator": ("decorated", ("grader", ("return function(*given)", "return 0.0")), ["source of decorate has"]),
    "one of two lambdas on a line": ("second", ("grader", ("2.0)\n", "3.0)\n")), ["source has changed"]),
}


@pytest.mark.parametrize("what", SOURCES)
def test_edited_source_is_another_identity(what, load):
    """Of a function or class: its text, what that names in its file, and the modules behind that, named one by one."""
    name, (file, edit), expected = SOURCES[what]
    module = load()
    before = parts(getattr(module, name) if name != "Grader" else module.Grader(1.0))
    assert before == parts(getattr(load(), name) if name != "Grader" else load().Grader(1.0))
    module = load(**{file: edit})
    found = changed_parts(before, parts(getattr(module, name) if name != "Grader" else module.Grader(1.0)))
    for text in expected:
        assert [one for one in found if one.startswith(text)], found


def test_what_a_function_does_not_use_is_no_part_of_it(load):
    """Another function and value of its file, the definition that names it, and the other lambda of its line."""
    before = parts(load().plain)
    for edit in (("UNUSED = 7", "UNUSED = 8"), ("return UNUSED", "return 2"), ("a definition, which", "another")):
        assert parts(load(grader=edit).plain) == before
    assert parts(load(words=("level()", "2")).plain) == before
    first = parts(load().first)
    assert parts(load(grader=("2.0)\n", "3.0)\n")).first) == first
    assert parts(load().second) != first


@dataclasses.dataclass
class Scored:
    """Fields of any kind."""

    weight: float = 1.0
    words: tuple[str, ...] = ("a", "b")


HELD: dict[str, tuple[Any, Any]] = {
    "a number": (1.0, -1.0),
    "a number of the other type": (1, 1.0),
    "a truth": (True, 1),
    "a text": ("good", "bad"),
    "half of a pair": ("\ud800", "\udc00"),
    "bytes": (b"a", b"b"),
    "text and bytes": ("a", b"a"),
    "a list": ([1, [2, 3]], [1, [2, 4]]),
    "a list and a tuple": ([1, 2], (1, 2)),
    "a split": (["ab", "c"], ["a", "bc"]),
    "a dict": ({"a": {"b": 1}}, {"a": {"b": 2}}),
    "a key": ({"a": 1}, {"b": 1}),
    "a set": ({"a", "b"}, {"a", "c"}),
    "an array": (np.arange(6.0), np.nextafter(np.arange(6.0), 9)),
    "the type of an array": (np.zeros(4, np.float32), np.zeros(4, np.int32)),
    "its shape": (np.zeros((2, 3)), np.zeros((3, 2))),
    "an array of objects": (np.array(["a", None]), np.array(["a", 1], object)),
    "an array in an array": ({"w": [np.zeros(2)]}, {"w": [np.ones(2)]}),
    "an array of dates": (np.array(["2024-01-01"], "M8[D]"), np.array(["2024-01-02"], "M8[D]")),
    "a strided array": (np.arange(8)[::2], np.arange(8)[1::2]),
    "a tensor": (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-6])),
    "a tensor of half the bytes": (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
    "a dataclass": (Scored(weight=1.0), Scored(weight=2.0)),
    "a field in it": (Scored(words=("a",)), Scored(words=("c",))),
    "a path": (Path("/data/a"), Path("/data/b")),
    "a pattern": (re.compile("a"), re.compile("b")),
    "a function": (len, sum),
    "a partial": (functools.partial(round, ndigits=1), functools.partial(round, ndigits=2)),
    "a namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
}


@pytest.mark.parametrize("held", ["attribute", "captured", "default", "more", "argument", "method", "in an object"])
def test_each_value_that_a_callable_holds_counts(held, load):
    """As an attribute, captured variable, default or argument of a partial: equal values are equal, others differ."""
    module = load()

    def of(value: Any) -> dict[str, str]:
        plain = closed = module.closure(0)
        if held == "attribute":
            return parts(module.Open(value=value))
        if held == "captured":
            return parts(module.closure(value))
        if held == "argument":
            return parts(functools.partial(module.plain, w=value))
        if held == "method":
            return parts(module.Open(value=value).grade)
        if held == "in an object":
            return parts(module.closure(module.Helper(module.Open(value=value))))
        plain = type(closed)(module.plain.__code__, module.plain.__globals__, "plain", module.plain.__defaults__)
        plain.__kwdefaults__ = dict(module.plain.__kwdefaults__)
        if held == "default":
            plain.__defaults__ = (value,)
        else:
            plain.__kwdefaults__["more"] = value
        return parts(plain)

    for kind, (first, second) in HELD.items():
        assert of(first) == of(copy.deepcopy(first)), kind
        assert len(changed_parts(of(first), of(second))) == 1, kind


def test_functions_that_are_held_count_with_their_source(load):
    """A captured function of the same file, and the values that it holds in turn."""
    module = load()
    before = parts(module.closure(module.closure(module.share)))
    assert "source of share" in before
    assert parts(module.closure(module.closure(module.unused))) != before
    edited = load(grader=("value * FLOOR", "value + FLOOR"))
    assert changed_parts(before, parts(edited.closure(edited.closure(edited.share)))) == ["source of share has changed"]


def test_what_is_not_observed_is_named(load):
    """A lock, a thread and an iterator have no value: the record names their place and type, and they are equal."""
    module = load()
    found = [parts(module.Open(lock=threading.Lock(), inner={"rows": iter([number])})) for number in range(2)]
    assert found[0] == found[1]
    unknown = {name for name, text in found[0].items() if text == NOT_OBSERVED}
    assert unknown == {"attribute lock (_thread.lock)", "attribute inner['rows'] (builtins.list_iterator)"}


def test_circles_and_large_values_end(load):
    """An object that holds itself, ten thousand levels, 100,000 lists, an array of which the middle is not read."""
    module = load()

    def circle(last: int) -> Any:
        held: Any = module.Open(rows=[1, 2, last])
        held.rows.append({"owner": held})
        return held

    assert parts(circle(3)) == parts(circle(3))
    assert parts(circle(3)) != parts(circle(4))
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    assert any("deep)" in name for name in parts(module.Open(deep=deep)))
    many = parts(module.Open(rows=[[number] for number in range(identity.MOST_OBJECTS + 1000)]))
    assert [name for name, text in many.items() if text == NOT_OBSERVED]
    large = np.zeros(identity.MOST_BYTES + 1, np.uint8)
    before = parts(module.Open(large=large.copy()))
    for place, differs in ((0, True), (-1, True), (identity.MOST_BYTES // 2, False)):
        other = large.copy()
        other[place] = 1
        assert (parts(module.Open(large=other)) != before) is differs


def test_it_is_taken_before_the_first_call(load):
    """A grader that counts its calls, fills a cache and appends to what it captured keeps its identity."""
    module = load()
    calls: list[int] = []
    counting = module.Open(calls=0, cache={})
    closed = module.closure(calls)
    before = parts(counting), parts(closed), parts(counting.grade)
    counting.calls += 1
    counting.cache["a"] = 1.0
    calls.append(1)
    assert (parts(counting), parts(closed), parts(counting.grade)) == before
    assert parts(module.Open(calls=1, cache={"a": 1.0})) != before[0]
    number = len(identity._IDENTITIES)
    del counting, closed
    gc.collect()
    assert len(identity._IDENTITIES) < number  # nothing is kept for what is gone


def test_code_of_this_project_has_the_identity_of_its_settings():
    """Its version is recorded by itself: a built-in reward has no parts but what it was given."""
    assert parts(token_match) == {}
    assert set(parts(Matches(pattern="a"))) == {"attribute pattern"}
    assert parts(Matches(pattern="a")) != parts(Matches(pattern="b"))


def test_code_without_a_file_is_observed_as_it_is():
    """Text that was executed, as in a notebook without its history: code, and the values that it names."""

    def of(text: str) -> dict[str, str]:
        namespace: dict[str, Any] = {"__name__": "nowhere"}
        exec(text, namespace)
        return parts(namespace["reward"])

    text = (
        "FLOOR = 0.5\ndef share(n):\n    return n * FLOOR\ndef reward(completion):\n    return share(len(completion))"
    )
    assert of(text) == of(text)
    for edit in (("0.5", "0.6"), ("n * ", "n + "), ("share(len", "share(2 * len")):
        assert of(text.replace(*edit)) != of(text)


def test_a_copy_in_another_folder_and_another_process_have_the_same_identity(load, tmp_path):
    """The folder, the order of sets and the addresses of objects are no part of it; another start is the same."""
    load()
    program = """
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import grader
from rlhf_pipeline.user_code.identity import identity_of
held = grader.Open(names={"a", "b", "c"}, folder=Path(sys.argv[1]) / "data", text=sys.argv[1] + "/x", f=grader.share)
print(json.dumps([identity_of(one) for one in (grader.plain, held, grader.closure(held))]))
"""
    found = []
    for number in range(3):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("copy*"))
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", program, str(folder)]
        found.append(json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout))
    assert found[0] == found[1] == found[2]
    assert "module words" not in found[0][0]
