"""Which rank does what, and what that costs: arithmetic alone, no torch."""
