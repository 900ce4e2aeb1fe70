"""Explanation of a run's layout: as numbers, as a text report, and traced through its real operators."""
