"""Run directory, and its files about a run: the configuration, starts, events and the ending.

Torch-free. `directory` writes and reads the run directory; `lock` decides which process holds it.
"""
