"""Reductions of gradients: the plain sum, and compressed sums."""
