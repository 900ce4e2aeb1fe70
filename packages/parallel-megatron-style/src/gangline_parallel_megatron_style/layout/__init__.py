"""Layouts: axis sizes and stages from a number of processes, and checks that they fit. Torch-free."""
