"""The definition of `soak.py --effects`: frozen lakes, shortened, whose walkers note where they begin and end."""

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


def noted_lake() -> Pipeline:
    """`frozen_lake` with a smaller model, half of each rollout and collectors that run ahead, without evaluation."""
    changes = {
        "policy.hidden_size": "16",
        "collect.prompts_per_rollout": "16",
        "buffer.max_staleness": "2",
        "learn.lr_schedule": "constant",
        "learn.checkpoint_every": "10",
    }
    found = definitions.find("frozen_lake").pipeline([*changes.items()])
    return dataclasses.replace(found, evaluate=None, environment=NotedLake)
