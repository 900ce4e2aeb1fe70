"""Saving: staged while the step waits, written and copied in the background."""
