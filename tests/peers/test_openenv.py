"""OpenEnv's own client and server, here in one process: a game is played over connections, turn by turn."""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn

from rlhf_pipeline import (
    Collect,
    Collector,
    LakeMaps,
    Prompt,
    TrajectoryReplayBuffer,
    TrajectoryStorage,
    Turn,
    scratch_policy,
)
from rlhf_pipeline.buffer.trajectory_schema import FAILURES, TURNS
from rlhf_pipeline.data.rewards import environment_reward
from rlhf_pipeline.environments.games import LAKE_ALPHABET, FrozenLake
from rlhf_pipeline.environments.openenv import OpenEnv
from rlhf_pipeline.errors import DefinitionError

# What the package's own imports and server warn about.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:websockets"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:uvicorn"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of frozen lakes; its address."""
    server_side: Any = pytest.importorskip("openenv.core.env_server", reason="openenv is not installed")

    class Move(server_side.Action):
        letter: str

    class Seen(server_side.Observation):
        text: str = ""

    class Lake(server_side.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: Any = None, episode_id: Any = None, cells: Any = None, **kwargs: Any) -> Any:
            self.game = FrozenLake()
            text = self.game.reset(Prompt(text="map", meta={"map": cells, "start": [0, 0]}), seed)
            return Seen(text=text, metadata={"seed": seed})

        def step(self, action: Any, timeout_s: Any = None, **kwargs: Any) -> Any:
            step = self.game.step(Turn(text=action.letter))
            return Seen(text=str(step.reply), done=step.done, reward=sum(step.rewards.values()))

        @property
        def state(self) -> Any:
            return server_side.State()

    app = server_side.create_fastapi_app(Lake, Move, Seen, max_concurrent_envs=16)
    door = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=running.run, args=([door],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{door.getsockname()[1]}"
    running.should_exit = True
    thread.join()
    door.close()


def lakes(client: Any) -> OpenEnv:
    """The environment of the page, whose map comes with the prompt."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "OpenEnv" in code)
    space: dict[str, Any] = {}
    exec(block, space)
    return space["lakes"](client)


@pytest.mark.peer
def test_one_conversation(server):
    """Reset and steps go over one connection; observation, reward and end come back."""
    from openenv.core.generic_client import GenericEnvClient

    prompt = Prompt(text="..|.G", meta={"map": ["..", ".G"]})
    for client in (server, functools.partial(GenericEnvClient, base_url=server)):
        game = lakes(client)()
        first = asyncio.run(game.reset(prompt, 2**40 + 5))
        one, two = (asyncio.run(game.step(Turn(text=text))) for text in ("R", "D"))
        game.end("stop")
        assert first == "#..#"
        assert (one.reply, one.done, one.rewards) == (",G##", False, {"reward": 0.5})
        assert (two.reply, two.done, two.rewards) == ("", True, {"reward": 1.5})


@pytest.mark.peer
def test_conversations_of_a_policy(server, tmp_path):
    """A rollout over the server has the tokens, log-probs and rewards of the same game played in place."""
    rows: list[Any] = []
    for number, environment in enumerate((FrozenLake, lakes(server))):
        policy = scratch_policy(LAKE_ALPHABET, hidden_size=16, num_layers=2, num_heads=2, seed=1, num_slots=16)
        storage = TrajectoryStorage(tmp_path / str(number), extra=[*FAILURES, TURNS])
        collector = Collector(
            policy=policy,
            prompts=LakeMaps(),
            reward=environment_reward,
            buffer=TrajectoryReplayBuffer(storage=storage),
            config=Collect(prompts_per_rollout=3, group_size=4, max_new_tokens=2, max_turns=5, max_row_tokens=60),
            seed=3,
            environment=environment,
        )
        collector.collect(0, policy_version=0)
        rows.append(storage.store.read(storage.store.ids()))
        storage.close()
    here, there = rows
    assert not any(there["failure_reason"])
    assert max(map(len, there["turn_spans"])) > 1
    for i, ids in enumerate(here["input_ids"]):
        assert there["input_ids"][i].tolist() == ids.tolist()
        assert there["assistant_mask"][i].tolist() == here["assistant_mask"][i].tolist()
        np.testing.assert_allclose(there["log_probs"][i], here["log_probs"][i], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(there["task_reward"]), torch.tensor(here["task_reward"]))


@pytest.mark.peer
def test_an_error_of_the_server_fails_one_conversation(server):
    """The server's own words are the conversation's failure."""
    game = lakes(server)()
    with pytest.raises(RuntimeError, match="Server error"):
        asyncio.run(game.reset(Prompt(text="no map", meta={"map": None}), 0))
    game.end("failed")


def test_without_the_package(monkeypatch):
    """One sentence with the command that installs it; a client of one's own needs no package of ours."""
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
    with pytest.raises(DefinitionError, match=r'pip install "rlhf-pipeline\[openenv\]"'):
        lakes("http://localhost:1")
    assert not lakes(dict).has_effects
