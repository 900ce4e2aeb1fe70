"""The places where a run's checkpoints lie, the nearest first: memory, its own directory, a durable store."""
