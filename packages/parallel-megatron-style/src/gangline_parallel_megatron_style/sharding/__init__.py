"""Which rank holds which box of which array. Torch-free."""
