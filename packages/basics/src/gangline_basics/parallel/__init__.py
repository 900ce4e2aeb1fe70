"""Strategies that hold the whole model on every rank: one process, data parallelism."""
