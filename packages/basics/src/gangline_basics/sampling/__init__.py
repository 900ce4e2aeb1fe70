"""Text from the model of a run."""
