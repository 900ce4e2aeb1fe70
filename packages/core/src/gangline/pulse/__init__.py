"""Pulse of a rank: its phase and collectives in shared memory of its machine, for watchers outside. Torch-free."""
