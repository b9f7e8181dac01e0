"""One identity of a definition: every field counts, or is excluded with a reason."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline import (
    CopyDigits,
    Evaluate,
    Mix,
    Pipeline,
    PretrainedPolicy,
    Prompts,
    Replay,
    Reward,
    TinyPolicy,
    exact_match,
    token_match,
)
from rlhf_pipeline.config_text import to_json
from rlhf_pipeline.run.config_diff import changes
from rlhf_pipeline.run.definition_identity import NOT_OF_AN_EVALUATION, evaluation_identity
from rlhf_pipeline.run.evaluation_rows import evaluation_store
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.recorded_code import changed_code, describe_code
from rlhf_pipeline.settings import paths_of
from tests.rlhf_pipeline.small import tiny

HELD_OUT = Evaluate(prompts=CopyDigits(num_digits=3))
BASE = dataclasses.replace(tiny(), evaluate=HELD_OUT)
PRETRAINED = dataclasses.replace(BASE, policy=PretrainedPolicy(path="model"))


def other(value: Any) -> Any:
    """A value that differs, whether the field allows it or not."""
    if callable(value):
        return exact_match if value is not exact_match else token_match
    if value is None:
        return 5
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 or 0.5
    if isinstance(value, int):
        return value + 1
    if isinstance(value, (str, tuple)):
        return value + type(value)("x")
    return {"x": 1} if isinstance(value, dict) else Mix((CopyDigits(num_digits=7),))


VALID = {
    "engine": "vllm",
    "top_p": 0.5,
    "min_p": 0.5,
    "dynamic_by": "a",
    "history": "rewritten",
    "chat_template": "{{ other }}",
}
"""Values of fields that are checked when an evaluation's sampling is derived from them."""


def with_other(config: Any, path: str) -> Any:
    """A copy with another value in one field, without the checks of the fields."""
    head, _, rest = path.partition(".")
    changed = copy.copy(config)
    value = getattr(config, head)
    if rest and value is None:
        value = Replay()
    object.__setattr__(changed, head, with_other(value, rest) if rest else VALID.get(head, other(value)))
    return changed


def leaves(pipeline: Pipeline) -> Iterator[str]:
    """The paths of the fields that are no groups."""
    for path, item in paths_of(Pipeline):
        owner: Any = pipeline
        for name in path.split(".")[:-1]:
            owner = getattr(owner, name) or Replay()
        if hasattr(owner, item.name) and not dataclasses.is_dataclass(getattr(owner, item.name)):
            yield path
    yield from ("prompts.num_digits", "evaluate.prompts.num_digits", "evaluate.prompts", "prompts")


def excluded(path: str) -> bool:
    return any(f"{path}.".startswith(f"{one}.") for one in NOT_OF_AN_EVALUATION)


@pytest.mark.parametrize("base", [BASE, PRETRAINED], ids=["tiny", "pretrained"])
def test_every_field_counts_or_is_excluded_with_a_reason(base):
    """Each field in turn gets another value: evaluations have another identity, or the list has the field.

    A resume sees every change.
    """
    before, recorded = evaluation_identity(base, base.evaluate), to_json(base)
    paths = list(dict.fromkeys(leaves(base)))
    assert len(paths) > 120

    for path in paths:
        changed = with_other(base, path)
        differs = evaluation_identity(changed, changed.evaluate) != before
        own = {"collect.group_size", "collect.dynamic", "collect.dynamic_by"}
        assert differs is not (excluded(path) or path in own), path
        assert list(changes(recorded, changed)) or list(changed_code(describe_code(base), changed)), path

    for path, reason in NOT_OF_AN_EVALUATION.items():
        assert reason
        assert any(f"{one}.".startswith(f"{path}.") for one in [*paths, "replay", "policy.path"]), path


def scaled(scale: Any) -> Callable[..., float]:
    def reward(completion: str) -> float:
        return float(scale)

    return reward


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completion: str) -> float:
        return self.scale

    def grade(self, completion: str) -> float:
        return self.scale


class Game:
    """An environment with a setting of its own."""

    size = 3

    def reset(self, prompt: Any, seed: int) -> None: ...

    def step(self, turn: Any) -> Any: ...


class LargeGame(Game):
    size = 4


def plain(completion: str, weight: float = 1.0) -> float:
    return weight


def heavy(completion: str, weight: float = 2.0) -> float:
    return weight


def placed(pipeline: Pipeline, folder: Path) -> str:
    """Where its evaluations are stored."""
    assert isinstance(pipeline.evaluate, Evaluate)
    return str(evaluation_store(RunFolder(folder), pipeline, pipeline.evaluate))


GRADERS: dict[str, tuple[Any, Any]] = {
    "a closure": (scaled(1.0), scaled(2.0)),
    "an object": (Scaled(1.0), Scaled(2.0)),
    "a method": (Scaled(1.0).grade, Scaled(2.0).grade),
    "a partial": (functools.partial(plain, weight=1.0), functools.partial(plain, weight=2.0)),
    "a default": (plain, heavy),
    "a version": (Reward(exact_match, name="a", version="1"), Reward(exact_match, name="a", version="2")),
    "one of two": ((Reward(scaled(1.0), name="a"), exact_match), (Reward(scaled(2.0), name="a"), exact_match)),
    "a weight": (Reward(exact_match, weight=1.0), Reward(exact_match, weight=2.0)),
}


@pytest.mark.parametrize("what", GRADERS)
def test_another_grader_stores_its_evaluations_apart(what, tmp_path):
    """Whatever it holds: rows that another one graded never answer for it."""
    first, second = (dataclasses.replace(BASE, reward=reward) for reward in GRADERS[what])
    assert placed(first, tmp_path) == placed(dataclasses.replace(first, description="again"), tmp_path)
    assert placed(first, tmp_path) != placed(second, tmp_path)


def test_environments_templates_and_sources_count(tmp_path):
    """A class attribute of an environment, the content of a chat template's file, and a source within a mixture."""
    games = [dataclasses.replace(BASE, environment=kind, reward=plain) for kind in (Game, LargeGame)]
    assert placed(games[0], tmp_path) != placed(games[1], tmp_path)
    template = tmp_path / "chat.jinja"
    chat = dataclasses.replace(BASE, policy=TinyPolicy(chat_template=str(template)))
    names = []
    for text in ("{{ messages }}", "{{ messages }} Be brief.", "{{ messages }}"):
        template.write_text(text)
        names.append(placed(chat, tmp_path))
    assert names[0] == names[2] != names[1]
    file, moved = tmp_path / "held.jsonl", tmp_path / "moved.jsonl"
    names = []
    for path, question in ((file, "1="), (file, "2="), (moved, "1=")):
        path.write_text(f'{{"question": "{question}", "answer": "1"}}\n')
        mix = Mix((Prompts(path=str(path)), Prompts(rows=[{"question": "9=", "answer": "9"}])))
        names.append(placed(dataclasses.replace(BASE, evaluate=Evaluate(prompts=mix)), tmp_path))
    assert names[0] == names[2] != names[1]
