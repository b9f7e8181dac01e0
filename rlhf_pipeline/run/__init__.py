"""A run: its folder, the loop that takes its steps, the sources of their batches, and its processes."""
