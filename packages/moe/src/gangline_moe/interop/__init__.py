"""Hugging Face models with experts: their architectures, tensor names and config.json."""
