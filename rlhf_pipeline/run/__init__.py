"""Learning from stores alone: gather the trajectories, then take steps on them; nothing is sampled."""

from __future__ import annotations

from rlhf_pipeline.offline.run import replay_stores

__all__ = ["replay_stores"]
