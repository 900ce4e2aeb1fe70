"""Sample order, shuffling and mixtures: O(1) pure functions of (seed, sources, weights, sample number). Torch-free."""
