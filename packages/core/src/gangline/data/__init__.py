"""What a run reads: what a data source imports. Torch-free but for the readers of whole batches."""
