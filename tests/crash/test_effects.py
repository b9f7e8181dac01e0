"""An environment with effects outside itself: a kill repeats no conversation that has ended."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from rlhf_pipeline import Pipeline, Reward, Step, Turn
from rlhf_pipeline.errors import DefinitionError
from rlhf_pipeline.run.folder import RunFolder
from rlhf_pipeline.run.start import run
from tests.crash._lakes import NOTES, NotedLake, small_lake
from tests.processes import Children
from tests.rlhf_pipeline.small import weights
from trajectory_store import TrajectoryStore

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(280)]

NUM = 2 * 4 * 4
"""Conversations of the run."""


class Killed(NotedLake):
    """Ends its process after so many ends."""

    kill_after: ClassVar[int | None] = None

    def step(self, turn: Turn) -> Step:
        """Kill the process if so many conversations have ended."""
        ended = Path(os.environ[NOTES]).read_text().split().count("ends")
        if self.kill_after is not None and ended >= self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(turn)


class Forgets(Killed):
    """Each turn shows the newest cells alone: a new row of the episode. It dies between episodes and within one."""

    def step(self, turn: Turn) -> Step:
        """Walk on, and forget."""
        step = super().step(turn)
        return step if step.done else Step(history=[{"role": "user", "content": str(step.reply)}], rewards=step.rewards)


def pipeline() -> Pipeline:
    """Two steps on a rollout of four groups of four each."""
    return small_lake(
        Killed, collect__prompts_per_rollout=4, collect__group_size=4, learn__steps=2, learn__checkpoint_every=1
    )


def live(children: Children, folder: Path, kill_after: int | None, environment: type[Killed] = Killed) -> int:
    """Go on with a run in a process of its own; return its exit code."""

    def act() -> None:
        os.environ[NOTES], Killed.kill_after = str(folder / "notes"), kill_after
        (folder / "notes").touch()
        run(
            dataclasses.replace(pipeline(), environment=environment),
            run_dir=folder / "run",
            resume=RunFolder(folder / "run").record.exists,
        )

    return children.fork(act).wait()


def rows(folder: Path) -> dict[int, list[int]]:
    """The tokens of each stored conversation."""
    with TrajectoryStore.open(folder / "run" / "store") as store:
        found = store.read(store.ids(), ["trajectory_id", "input_ids"])
    return dict(zip(found["trajectory_id"].tolist(), map(list, found["input_ids"]), strict=True))


def test_a_kill_repeats_no_conversation_that_has_ended(tmp_path, children):
    """Killed in either rollout: what had ended is stored and not begun again, and the rest is sampled as without."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    assert live(children, straight, None) == 0
    notes, stored = killed / "notes", list[int]()
    for kill_after in (5, 21):
        begun = Counter(notes.read_text().split())["begins"] if notes.exists() else 0
        assert live(children, killed, kill_after) == -signal.SIGKILL
        said = Counter(notes.read_text().split())
        assert said["ends"] == len(rows(killed))
        begins = 16 if not stored else 16 - stored[-1] + 16
        assert said["begins"] - begun == begins
        stored.append(len(rows(killed)))
    assert 5 <= stored[0] < 16 < 21 <= stored[1] < NUM
    assert live(children, killed, None) == 0
    assert Counter(notes.read_text().split())["ends"] == NUM
    assert rows(killed) == rows(straight)
    with TrajectoryStore.open(killed / "run" / "store") as store:
        assert not torch.tensor(store.read_scalars("advantage")).isnan().any()


def test_a_kill_leaves_all_rows_of_an_episode_or_none(tmp_path, children):
    """An episode of several rows is one commit: killed between and within episodes, the rows are those of no kill."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    assert live(children, straight, None, Forgets) == 0
    for kill_after in (5, 21):
        assert live(children, killed, kill_after, Forgets) == -signal.SIGKILL
        with TrajectoryStore.open(killed / "run" / "store") as store:
            names = ("episode_id", "episode_row", "episode_size")
            each = zip(*(store.read_scalars(name).tolist() for name in names), strict=True)
        stored = dict[int, list[int]]()
        for episode, row, size in each:
            stored.setdefault(episode, []).append(row)
            assert row < size
        sizes = [len(positions) for positions in stored.values()]
        assert all(positions == [*range(len(positions))] for positions in stored.values())
        assert len(stored) == Counter((killed / "notes").read_text().split())["ends"]
        assert max(sizes) > 1
    assert live(children, killed, None, Forgets) == 0
    assert weights(killed / "run") == weights(straight / "run")
    assert Counter((killed / "notes").read_text().split())["ends"] == NUM
    assert rows(killed) == rows(straight)
    with TrajectoryStore.open(killed / "run" / "store") as store:
        assert not torch.tensor(store.read_scalars("advantage")).isnan().any()


def test_rewards_of_whole_groups_are_refused(tmp_path):
    """Each conversation is graded as it ends, and such a function needs all of them."""

    def of_group(completions: list[str], **columns: object) -> list[float]:
        return [0.0] * len(completions)

    with pytest.raises(DefinitionError, match="a batched reward function cannot be used"):
        run(dataclasses.replace(pipeline(), reward=Reward(of_group)), run_dir=tmp_path / "run")
