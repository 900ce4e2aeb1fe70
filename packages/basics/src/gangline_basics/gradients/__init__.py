"""Reductions of gradients: the plain sum, and sums whose parts travel compressed."""
