"""Collectors: prompts in, completed trajectories out, through the write path into the store."""
