"""Run directory, and the files in it about a run: its configuration, its starts, its events, its ending.

Torch-free. `directory` writes and reads it, `lock` decides which process holds it.
"""
