"""Functions that overwrite, empty, extend and keep all that they receive: rows are those of functions that do not."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_pipeline import (
    Collect,
    Evaluate,
    Learn,
    Pipeline,
    Prompt,
    Prompts,
    Reward,
    Step,
    TinyPolicy,
    Tools,
    Turn,
    WritePath,
)
from rlhf_pipeline.report.inspect import grade
from rlhf_pipeline.report.query import View
from rlhf_pipeline.run.bound_rewards import bound_to_stored
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.rlhf_pipeline.small import weights
from trajectory_store import TrajectoryStore

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'U', 'assistant': 'A', 'tool': 'T', 'system': 'S'}[m.role] }}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}+{{ c.function.arguments.cells[0] }}{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
CALLS = {
    "start_anchor": "A",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "+",
            "close": "<|im_end|>",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "mark", "arguments": {"cells": ["{content}"]}}},
        },
    },
}
IS_HOSTILE = False
KEPT: list[Any] = []


def ruin(*values: Any) -> None:
    """Change all that was received, now and earlier."""
    if IS_HOSTILE:
        KEPT.extend(values)
        for value in KEPT[-40:]:
            _ruin(value)


def _ruin(value: Any) -> None:
    if isinstance(value, dict):
        for part in [*value.values()]:
            _ruin(part)
        for name in [*value]:
            value[name] = "overwritten"
        if value:
            del value[next(iter(value))]
        value["ruined"] = "ruined"
    elif isinstance(value, list):
        for part in value:
            _ruin(part)
        value.reverse()
        value.append("ruined")
        del value[:1]


def plain(completion: str, meta: Any, board: Any, tests: Any, messages: Any, token_ids: Any, answer: Any) -> Any:
    """Return a figure that every argument decides."""
    score = len(completion) + sum(board) + len(tests) + len(messages) + sum(token_ids) % 7 + len(answer) + len(meta)
    ruin(meta, board, tests, messages, token_ids, answer)
    return {"score": float(score), "cells": float(len(board))}


def batched(prompts: Any, completions: Any, completion_ids: Any, board: Any, **columns: Any) -> list[float]:
    """As TRL's form."""
    scores = [
        float(len(cells) + sum(ids) % 5 + len(completions)) for cells, ids in zip(board, completion_ids, strict=True)
    ]
    ruin(prompts, completions, completion_ids, board, columns)
    return scores


async def later(prompt: str, meta: Any, answer: Any, rewards: Any, call_errors: int) -> float:
    """A coroutine."""
    score = float(len(meta["board"]) + len(rewards) + call_errors)
    ruin(meta, answer, rewards)
    return score


class Board:
    """Keeps its state in what it was given, as users do."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        """Show messages, and keep them."""
        self.board, self.prompt = prompt.meta["board"], prompt
        self.history: list[Any] = [{"role": "user", "content": "".join(map(str, self.board))}]
        ruin(prompt.meta["tests"], prompt.answer)
        return self.history

    def answered(self, turn: Turn) -> Step:
        """Note a turn in the column."""
        self.board[turn.number - 1] += 1
        info = {"board": [self.board]}
        step = Step(
            [{"role": "user", "content": "ok"}],
            done=turn.number == 2,
            rewards={"own": float(sum(self.board))},
            info=info,
        )
        self.history.append(step.reply)
        ruin(turn.tool_calls)
        return step

    def step(self, turn: Turn) -> Step:
        """Answer in place."""
        step = self.answered(turn)
        self.later = step
        return step

    def end(self, reason: str) -> dict[str, float]:
        """Change what was returned before."""
        ruin(self.later.reply, self.later.info, self.later.rewards, self.history)
        return {"last": 1.0}


class AsyncBoard(Board):
    """The same, as a coroutine."""

    async def step(self, turn: Turn) -> Step:  # type: ignore[override]
        """Answer later."""
        return Board.step(self, turn)


class ParallelBoard(Board):
    """The same, in threads."""

    parallel = True


def mark(cells: list[str]) -> list[str]:
    """Mark cells.

    Args:
        cells: which
    """
    marked = [f"{cell}g" for cell in cells]
    ruin(cells)
    return marked


class Marks:
    """TRL's form: its columns are its own."""

    def reset(self, board: Any, tests: Any, prompt: Any, **columns: Any) -> str:
        """Keep a column."""
        self.board = board
        shown = str(len(tests))
        ruin(tests, columns, prompt)
        return shown

    def mark(self, cells: list[str]) -> str:
        """Mark cells.

        Args:
            cells: which
        """
        self.board[0] += len(cells)
        ruin(cells)
        return "g"

    def get_reward(self) -> dict[str, float]:
        """Return what is on the board."""
        return {"own": float(sum(self.board))}


def pipeline(environment: Any) -> Pipeline:
    """Eight rows that come back in the third step, two members each, and an evaluation."""
    rows = [
        {"question": f"{i}=", "answer": [str(i), "x"], "board": [0, i], "tests": [f"t{j}" for j in range(4)]}
        for i in range(8)
    ]
    source = Prompts(rows=rows, as_chat=environment is not None)
    return Pipeline(
        name="hostile",
        policy=TinyPolicy(
            alphabet="0123456789= gokxUATS+[],'\"erailnwstmdhvu:",
            hidden_size=16,
            num_layers=1,
            num_heads=2,
            chat_template=CHAT_TEMPLATE,
            response_template=CALLS,
        ),
        prompts=source,
        environment=environment,
        reward=(Reward(plain), Reward(batched), Reward(later)),
        collect=Collect(prompts_per_rollout=4, group_size=2, max_new_tokens=3, max_turns=3, reply_after=4),
        write=WritePath(zero_variance="keep"),
        evaluate=Evaluate(
            prompts=Prompts(rows=[{**row, "question": f"{row['question']}="} for row in rows[:4]]), every=2
        ),
        learn=Learn(steps=4, lr=1e-2, checkpoint_every=2),
    )


def all_rows(folder: Path) -> dict[str, Any]:
    """Return each column of the run's store and of its evaluations, and the last weights."""
    found: dict[str, Any] = {"weights": weights(folder)}
    for path in [folder / "store", *sorted((folder / "evaluations").iterdir())]:
        if path.is_dir():
            with TrajectoryStore.open(path) as store:
                columns = store.read(store.ids())
            found |= {
                f"{path.name[:5]}.{name}": [getattr(value, "tolist", lambda value=value: value)() for value in column]
                for name, column in columns.items()
                if name != "created_at"
            }
    return found


@pytest.mark.parametrize(
    "environment",
    [
        pytest.param(None, id="completions"),
        pytest.param(Board, id="in_place", marks=pytest.mark.slow),
        pytest.param(AsyncBoard, id="async"),
        pytest.param(ParallelBoard, id="parallel", marks=pytest.mark.slow),
        pytest.param(Tools(mark), id="tools"),
        pytest.param(Marks, id="trl", marks=pytest.mark.slow),
    ],
)
def test_rows_are_those_of_functions_that_change_nothing(
    environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of siblings, epochs, evaluations and a resumed run, byte for byte; graded again they have the same rewards."""
    definition = pipeline(environment)
    run(definition, run_dir=tmp_path / "plain")
    expected = all_rows(tmp_path / "plain")
    monkeypatch.setattr(f"{__name__}.IS_HOSTILE", True)
    run(definition, run_dir=tmp_path / "hostile")
    first = dataclasses.replace(definition, learn=dataclasses.replace(definition.learn, steps=2))
    run(first, run_dir=tmp_path / "resumed")
    KEPT.clear()
    run(definition, run_dir=tmp_path / "resumed", resume=True)
    for name in ("hostile", "resumed"):
        rows = all_rows(tmp_path / name)
        assert rows.keys() == expected.keys()
        assert [column for column in rows if repr(rows[column]) != repr(expected[column])] == []
    with closing(View(tmp_path / "hostile")) as view:
        graded = grade(view, lambda columns: bound_to_stored(definition, columns))
    assert graded is not None
    assert (graded["agrees"], graded["different"]) == (True, 0)
    metas = [json.loads(meta)["prompt"] for meta in expected["store.meta"]]
    assert all(meta["tests"] == ["t0", "t1", "t2", "t3"] for meta in metas)
    assert RunFolder(tmp_path / "hostile").record.exists
