"""Data for gangline: hooks only, no torch."""
