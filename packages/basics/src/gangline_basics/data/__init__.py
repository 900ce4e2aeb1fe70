"""Text as data: bytes or a tokenizer, and conversations by chat templates."""
