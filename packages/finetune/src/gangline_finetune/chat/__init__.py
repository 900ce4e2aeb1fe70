"""Conversations as data: read, rendered by the tokenizer's chat template, masked and packed."""
