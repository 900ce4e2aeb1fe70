"""Plugins: the hooks that they implement, the parts that they offer, and their discovery.

Torch-free. `hooks` has the table of hooks, `parts` has `Part`, `registry` has the installed parts.
"""
