"""Placement of arrays: the boxes of every array and the ranks that hold them. Torch-free."""
