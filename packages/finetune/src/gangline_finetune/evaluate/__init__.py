"""Command and callback for evaluation: tasks of lm-eval on the model of a run."""
