"""Trackers: the console, metrics.jsonl, TensorBoard."""
