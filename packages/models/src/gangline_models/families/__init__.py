"""A family each: its options, its tree of nodes, the names of its weights, and its words in config.json."""
