"""Sharding of arrays: the boxes of every array and the ranks that hold them. Imports no torch."""
