"""A run: its folder, the loop that takes its steps, what they learn from, and its processes."""
