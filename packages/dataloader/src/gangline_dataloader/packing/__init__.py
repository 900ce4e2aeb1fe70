"""Sequence packing: documents packed into rows with few documents split, and pack plans stored next to a store."""
