"""Tiers of a run's checkpoints, nearest first: memory, the run's own directory, a durable store."""
