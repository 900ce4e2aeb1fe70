"""Model families, one module each: options, tree of nodes, Hugging Face names and config.json."""
