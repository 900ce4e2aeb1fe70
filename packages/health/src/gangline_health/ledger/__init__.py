"""Time ledger of a run: each second belongs to exactly one category."""
