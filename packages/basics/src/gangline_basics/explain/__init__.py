"""Memory, transfers and work of strategies that replicate the model; activation memory of modules. Torch-free."""
