"""`gangline eval`: tasks of lm-eval on the model of a run."""
