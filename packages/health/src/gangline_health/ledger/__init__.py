"""Ledger of a run's time: each second in exactly one account."""
