"""Callbacks: exponential moving averages of the weights, torch.profiler traces."""
