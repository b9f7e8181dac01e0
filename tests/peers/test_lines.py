"""What a user writes for an agent, beside the same programs for peers: lines that are neither blank nor comment."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlhf_pipeline import FrozenLake, Prompt, Tools, Turn
from rlhf_pipeline.environments.makers import maker_of

ROOT = Path(__file__).resolve().parents[2]
ANCHORS = ROOT / "../shared/research/prototypes/agents/anchors"
LAKE = """
from game import look, move, new
from rlhf_pipeline import Collect, Evaluate, Pipeline, PretrainedPolicy, Prompts, Step

class Lake:
    def reset(self, prompt, seed):
        self.game = new(prompt.meta["seed"])
        return look(self.game)

    def step(self, turn):
        done, reached = move(self.game, turn.text)
        return Step(look(self.game), done=done, rewards={"reached": float(reached)})

maps = [{"question": "Reach G.", "answer": "G", "seed": seed} for seed in range(2000)]

def lake() -> Pipeline:
    return Pipeline(
        name="lake",
        policy=PretrainedPolicy(path="model"),
        prompts=Prompts(rows=maps[:1900]),
        environment=Lake,
        collect=Collect(max_turns=12),
        evaluate=Evaluate(prompts=Prompts(rows=maps[1900:]), every=20),
    )
"""


def calculator() -> str:
    """The program of the page."""
    page = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[-1]


def lines(text: str) -> int:
    """Lines that are neither blank nor a comment."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


@pytest.fixture
def game(monkeypatch) -> None:
    """The game that the programs import: `new`, `look`, `move`."""
    module: Any = ModuleType("game")

    def new(seed: int) -> list[Any]:
        lake = FrozenLake()
        return [lake, lake.reset(Prompt(text="map", meta={"map": ["..", ".G"], "start": [0, seed % 2]}), seed)]

    def move(game: list[Any], letter: str) -> tuple[bool, bool]:
        step = game[0].step(Turn(text=letter))
        game[1] = step.reply
        return step.done, bool(step.rewards["reached"])

    module.new, module.look, module.move = new, lambda game: game[1], move
    monkeypatch.setitem(sys.modules, "game", module)


@pytest.mark.peer
def test_the_programs_run(game):
    """Both define a pipeline whose environment answers."""
    space: dict[str, Any] = {"__name__": "programs"}
    exec(LAKE, space)
    exec(calculator(), space)
    environment: Any = maker_of(space["lake"]().environment)()
    environment.reset(Prompt(text="Reach G.", meta={"seed": 1}), 0)
    step = environment.step(Turn(text="D"))
    assert (step.done, step.rewards) == (True, {"reached": 1.0})
    tools = space["calculator"]().environment
    assert isinstance(tools, Tools)
    assert tools.tools[0]("12+30") == "42"


@pytest.mark.peer
def test_a_user_writes_no_more_than_with_the_shortest_peer():
    """Whole programs against TRL's, the shortest that is whole; environments alone against SkyRL-Gym's."""
    if not ANCHORS.is_dir():
        pytest.skip("the peers' programs (../shared) are not here")
    peers = {path.stem: lines(path.read_text(encoding="utf-8")) for path in ANCHORS.glob("*.py")}
    for ours, name in ((calculator(), "calc"), (LAKE, "lake")):
        alone = re.split(r"^(?:sums|maps) = ", ours, flags=re.MULTILINE)[0]
        whole = [f"{peer}_{name}" for peer in ("trl", "tinker", "vf04")]
        assert lines(ours) <= min(peers[peer] for peer in whole) == peers[f"trl_{name}"]
        assert lines(alone) <= min(size for peer, size in peers.items() if peer.endswith(f"_{name}"))
    assert (lines(calculator()), lines(LAKE)) == (18, 19)
