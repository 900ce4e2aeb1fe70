"""Precisions: fp64, fp32, bf16, and fp16 with loss scaling."""
