"""Batches through NVIDIA DALI: the pipeline is fed in sample order, and torch uses its output memory without a copy."""
