"""Precision `fp8`, for every strategy: matmuls in 8-bit floating point (FP8)."""
