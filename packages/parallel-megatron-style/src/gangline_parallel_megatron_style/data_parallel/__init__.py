"""Data parallelism: flat units of parameters, what is cut of them, and sums of gradients."""
