"""Sequence packing: documents packed into rows so that few are truncated, and pack plans stored next to a store."""
