"""Seconds of matmuls, attention, transfers and steps, by the numbers of a cluster file. Torch-free."""
