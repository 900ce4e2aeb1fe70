"""Decoder: its options, nodes, modules and computations."""
