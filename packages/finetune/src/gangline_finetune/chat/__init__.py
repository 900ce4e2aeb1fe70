"""Data source `chat`: conversations read, rendered by the tokenizer's chat template, masked and packed."""
