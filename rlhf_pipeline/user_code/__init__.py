"""Code of users, called by every part that grades, answers or asks for prompts.

One component copies what a function receives, checks what it returns, and runs and identifies the function.
"""
