"""Closed forms of the cost of a layout for a rank: bytes stored and sent, operations, time. Torch-free."""
