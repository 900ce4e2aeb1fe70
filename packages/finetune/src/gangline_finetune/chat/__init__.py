"""Conversations as data: read, rendered by the tokenizer's own template, masked and packed."""
