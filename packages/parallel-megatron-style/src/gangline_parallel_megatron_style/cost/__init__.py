"""Closed forms of what a layout costs a rank: bytes that it keeps and sends, operations, time. Torch-free."""
