"""Matmuls in 8-bit floating point (FP8): a precision for every strategy."""
