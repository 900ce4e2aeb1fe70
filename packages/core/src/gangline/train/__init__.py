"""Training on one rank: build, loop, end."""
