"""A save: staged while the step waits, written and copied beside training."""
