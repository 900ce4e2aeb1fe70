"""Figures of plans: as text on a terminal, and as files by `gangline_basics.figure`."""
