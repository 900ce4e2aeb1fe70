"""Explanation of a run's layout: as numbers, as a text report, and as a trace of the real operators."""
