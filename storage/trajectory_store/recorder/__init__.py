"""The conversion of rollouts to rows of a store: the recorder, its standard columns and its codecs.

The store does not import this package or `adapters`: they use it as any other program does.
"""

from trajectory_store.recorder.learnable_rows import LearnableRows, learnable_rows
from trajectory_store.recorder.trajectory_recorder import TrajectoryRecorder

__all__ = ["LearnableRows", "TrajectoryRecorder", "learnable_rows"]
