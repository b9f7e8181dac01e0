"""The mean reward of each source of a mixture, and of each of several environments, for `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhf_pipeline.collectors.curriculum import FollowedMix
from rlhf_pipeline.data.prompts import Mix, PromptSource, prompt_at
from rlhf_pipeline.data.rewards import as_column
from rlhf_pipeline.environments.makers import Environments


class SourceRewards:
    """Groups the rewards of rows by the source of their prompts, which is a function of the prompts' cursors.

    Args:
        prompts: the source of prompts.
        make: what makes environments; None samples one turn.
        seed: of the run.
    """

    def __init__(self, prompts: PromptSource, make: Any, seed: int) -> None:
        self._mix = prompts if isinstance(prompts, (Mix, FollowedMix)) else None
        self._environments = make if isinstance(make, Environments) else None
        self._prompts, self._seed = prompts, seed
        self._labels = [] if self._mix is None else source_labels(self._mix.sources)

    @classmethod
    def of(cls, prompts: PromptSource, make: Any, seed: int) -> SourceRewards | None:
        """Return the object that groups the rewards; None if there is only one source and one environment."""
        sources = prompts.sources if isinstance(prompts, (Mix, FollowedMix)) else ()
        makers = make.makers if isinstance(make, Environments) else ()
        return cls(prompts, make, seed) if max(len(sources), len(makers)) > 1 else None

    def figures(
        self, cursors: npt.NDArray[np.int64], rewards: npt.NDArray[np.floating], rollout_figures: Mapping[str, object]
    ) -> dict[str, float | None]:
        """Return `reward/SOURCE` and `reward/ENVIRONMENT`, the means of the graded rows; None where none is graded.

        Args:
            cursors: int64 [n], of the rows' prompts.
            rewards: [n]; NaN for a row without one.
            rollout_figures: the rollout's figures by name; a source with a reward's name gets the suffix `_source`.
        """
        rows: dict[str, list[float]] = {}
        for cursor in np.unique(cursors).tolist():
            of_prompt = rewards[(cursors == cursor) & np.isfinite(rewards)].tolist()
            for label in self._labels_of(cursor):
                rows.setdefault(label, []).extend(of_prompt)
        means = {label: math.fsum(values) / len(values) if values else None for label, values in rows.items()}
        figure_names = {
            label: f"reward/{label}{'_source' if f'reward/{label}' in rollout_figures else ''}" for label in means
        }
        return {figure_names[label]: mean for label, mean in sorted(means.items())}

    def _labels_of(self, cursor: int) -> list[str]:
        labels = [] if self._mix is None else [self._labels[self._mix.source_of(cursor)]]
        if self._environments is not None:
            name = prompt_at(self._prompts, cursor, self._seed).meta.get(self._environments.column)
            if isinstance(name, str) and name in self._environments.makers:  # otherwise its conversations have failed
                labels.append(as_column(name) or name)
        return labels


def source_labels(sources: tuple[PromptSource, ...]) -> list[str]:
    """Return a name for each source: its file, otherwise its class; with a number if two names are equal.

    >>> from rlhf_pipeline import CopyDigits, Prompts
    >>> source_labels((Prompts("data/gsm8k.jsonl"), CopyDigits(num_digits=2), CopyDigits(num_digits=5)))
    ['gsm8k', 'CopyDigits', 'CopyDigits_2']
    """
    labels: list[str] = []
    for place, source in enumerate(sources):
        path = str(getattr(getattr(source, "source", source), "path", ""))
        stem = Path(path).name.partition(".")[0] if path else type(source).__name__
        label, number = as_column(stem) or f"source{place}", 1
        unique = label
        while unique in labels:
            number += 1
            unique = f"{label}_{number}"
        labels.append(unique)
    return labels
