"""Layouts: axis sizes and pipeline stages from a number of processes, and checks of a layout. Imports no torch."""
