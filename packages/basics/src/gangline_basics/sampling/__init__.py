"""Text generation with the model of a run."""
