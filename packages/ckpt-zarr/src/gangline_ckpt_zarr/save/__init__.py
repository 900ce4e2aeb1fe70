"""Saves: arrays are staged while the step waits, then written and copied in the background."""
