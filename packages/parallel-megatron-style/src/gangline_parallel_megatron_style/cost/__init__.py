"""Closed forms of the cost of a layout for a rank: bytes stored, bytes sent, operations, time. Imports no torch."""
