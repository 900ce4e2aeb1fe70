"""The pulse of a rank: where it is, in shared memory of its machine, for whoever watches from outside. Torch-free."""
