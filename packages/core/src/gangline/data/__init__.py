"""Data of a run: contracts and helpers that a data source imports. Torch-free except for the readers of batches."""
