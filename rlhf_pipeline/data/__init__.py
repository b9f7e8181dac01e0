"""Trajectories as flat columns, the names of their columns, and the sources of prompts and rewards."""

from rlhf_pipeline.data import keys as keys
