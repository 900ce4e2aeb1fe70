"""Strategies that replicate the model on every rank: one process, data parallelism."""
