"""Closed-form cost of a layout, per rank: bytes stored, bytes sent, FLOPs, time. Imports no torch."""
