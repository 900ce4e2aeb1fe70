"""Places where checkpoints lie: a local file system, or anything fsspec opens, behind one interface."""
