"""Text from a model: tokens drawn one after another, and what is a prompt and an end."""
