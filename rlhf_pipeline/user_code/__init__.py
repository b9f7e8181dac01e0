"""User code, called by every part that grades, answers or requests prompts.

One component copies what a function receives, checks what it returns, and runs and identifies the function.
"""
