"""Programs that run in the environment of another trainer, which loads our adapters by its own functions."""
