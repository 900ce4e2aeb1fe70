"""Where a run's records go: what a tracker imports. Torch-free."""
