"""Engines turn prompts of token ids into completions, with log-probs and the versions of the weights."""
