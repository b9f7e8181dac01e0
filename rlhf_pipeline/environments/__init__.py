"""Objects that answer a policy: games, tools, and environments of other libraries. Nothing here imports torch."""
