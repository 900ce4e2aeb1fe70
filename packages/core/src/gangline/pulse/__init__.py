"""Pulse of a rank: its phase and collectives in shared memory, for watchers in other processes. Torch-free."""
