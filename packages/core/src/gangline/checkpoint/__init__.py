"""Checkpoints: the contract of a checkpointer, the arrays that it stores, and which checkpoints may be deleted.

Torch is loaded with the first module that needs torch.
"""
