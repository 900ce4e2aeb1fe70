"""Model families: for each its options, its tree of nodes, its Hugging Face names and its config.json."""
