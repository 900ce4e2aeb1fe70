"""Checkpoints in the format of torch.distributed.checkpoint."""
