"""Burn-in: measures machines before a run, and names bad ranks before step 1."""
