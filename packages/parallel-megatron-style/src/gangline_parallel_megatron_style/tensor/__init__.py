"""Tensor parallelism (Shoeybi et al., Megatron-LM, arXiv 1909.08053) with sequence parallelism (Korthikanti et al.,
arXiv 2205.05198): explicit communication around plain matmuls, on plain local tensors.
"""
