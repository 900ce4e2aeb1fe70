"""Writer process of each rank: it writes staged bytes, so that the trainer's Python interpreter is not blocked."""
