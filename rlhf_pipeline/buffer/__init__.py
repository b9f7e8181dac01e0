"""Trajectories on disk behind TorchRL's storage and replay buffer interfaces."""
