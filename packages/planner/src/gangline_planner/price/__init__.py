"""Prices of shapes and bytes in seconds, by the numbers of a cluster file. Torch-free arithmetic."""
