"""Models with experts of Hugging Face: their architectures, the names of their arrays, and their config.json."""
