"""Text as data: bytes or a tokenizer, conversations by chat templates."""
