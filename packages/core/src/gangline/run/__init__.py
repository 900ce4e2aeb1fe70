"""The run directory, and what is kept in it about a run: its configuration, its starts, its events, its ending.

Torch-free. `directory` writes and reads it whole, `lock` says who holds it, `listing` reads many of them.
"""
