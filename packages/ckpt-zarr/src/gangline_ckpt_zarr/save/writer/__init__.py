"""The process beside each rank that writes what was staged, so that the trainer's Python is left alone."""
