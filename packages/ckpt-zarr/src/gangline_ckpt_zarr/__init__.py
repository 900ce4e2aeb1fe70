"""Checkpoints in zarr v3 for gangline: hooks only, no torch."""
