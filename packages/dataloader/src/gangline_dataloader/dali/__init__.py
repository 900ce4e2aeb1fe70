"""Batches through NVIDIA DALI: a pipeline fed from our order, its memory handed to torch as it is."""
