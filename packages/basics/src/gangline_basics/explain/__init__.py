"""Memory, transfers and work of strategies with the whole model on every rank; activations of modules. Torch-free."""
