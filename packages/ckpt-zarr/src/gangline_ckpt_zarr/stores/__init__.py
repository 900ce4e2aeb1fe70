"""Object stores for checkpoints: a local file system, or anything fsspec opens, behind one interface."""
