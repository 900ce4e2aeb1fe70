"""A corpus as token ids on disk: .npy shards with the ends of their documents, and a manifest written last."""
