"""From a number of processes to axes and stages, and what does not fit. Torch-free."""
