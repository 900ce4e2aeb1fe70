"""Token store: a corpus as token ids on disk, in .npy shards with document ends, and a manifest written last."""
