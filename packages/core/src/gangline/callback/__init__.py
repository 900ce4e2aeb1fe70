"""What acts while a run lives, on every rank: what a callback imports."""
