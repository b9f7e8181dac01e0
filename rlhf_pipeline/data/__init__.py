"""What travels: trajectories as flat columns, the names of their columns, and where prompts and rewards come from."""

from rlhf_pipeline.data import keys as keys
