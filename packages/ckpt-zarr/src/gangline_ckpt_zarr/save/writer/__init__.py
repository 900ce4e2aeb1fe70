"""Writer process next to each rank: it writes staged bytes, so that the trainer's Python is left alone."""
