"""Figures of plans: text on a terminal, and image files by `gangline_basics.figure`."""
