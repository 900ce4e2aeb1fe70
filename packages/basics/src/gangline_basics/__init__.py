"""Default parts of a run: models, optimizers, data, checkpoints, trackers and launchers."""
