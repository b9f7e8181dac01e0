"""What answers a policy's turns: games, tools, and environments of other libraries. Nothing here imports torch."""
