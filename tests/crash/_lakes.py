"""Frozen lakes, shortened, whose walkers note where they begin and end; the definition of `soak.py --effects`."""

from __future__ import annotations

import dataclasses
import os
import time

from rlhf_pipeline import FrozenLake, Pipeline, Prompt, definitions

NOTES = "LAKE_NOTES"
"""The environment variable that names the file of notes; without it nothing is noted."""


class NotedLake(FrozenLake):
    """Its effect outside: a line in a file, with the process, the time and the group."""

    has_effects = True

    def reset(self, prompt: Prompt, seed: int) -> str:
        """Note a beginning."""
        self.group = seed
        self.note("begins")
        return super().reset(prompt, seed)

    def end(self, reason: str) -> dict[str, float]:
        """Note an end."""
        self.note("ends")
        return {}

    def note(self, word: str) -> None:
        """Append a line at once, so that those of two processes do not mix."""
        if NOTES in os.environ:
            file = os.open(os.environ[NOTES], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(file, f"{word} {os.getpid()} {time.time():.6f} {self.group}\n".encode())
            os.close(file)


def small_lake(environment: type[FrozenLake], **changes: int) -> Pipeline:
    """Return `frozen_lake` with a smaller model, one step on each rollout, and other settings, `a__b` for `a.b`."""
    settings = {"buffer.max_staleness": "0", "sample.strategy": "fresh", "sample.min_ess": "none", "learn.epochs": "1"}
    settings |= {name.replace("__", "."): str(value) for name, value in changes.items()}
    settings |= {"policy.hidden_size": "16", "learn.lr_schedule": "constant"}
    pipeline = definitions.find("frozen_lake").pipeline([*settings.items()])
    return dataclasses.replace(pipeline, evaluate=None, environment=environment)


def noted_lake() -> Pipeline:
    """A quarter of each rollout, and collectors that run ahead."""
    return small_lake(NotedLake, collect__prompts_per_rollout=16, buffer__max_staleness=2, learn__checkpoint_every=10)
