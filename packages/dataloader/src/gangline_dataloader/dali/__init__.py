"""Batches through NVIDIA DALI: a pipeline fed in the data source's order, whose memory torch uses without a copy."""
