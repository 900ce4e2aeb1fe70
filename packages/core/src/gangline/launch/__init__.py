"""From a run directory to running processes: what a launcher imports. Torch-free."""
