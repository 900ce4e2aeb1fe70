"""Machines measured before a run: bad ranks are named before step 1."""
