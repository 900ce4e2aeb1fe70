"""Checkpoints in the files of torch.distributed.checkpoint."""
