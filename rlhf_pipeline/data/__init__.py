"""What travels: trajectories as flat columns."""
