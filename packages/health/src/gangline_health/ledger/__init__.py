"""Ledger of a run's time: each second counts to exactly one kind of time."""
