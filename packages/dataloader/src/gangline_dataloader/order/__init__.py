"""Which sample comes when: pure functions of (seed, sources, weights, number), computed in O(1). Torch-free."""
