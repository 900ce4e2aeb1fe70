"""What strategies that hold the whole model on every rank explain of themselves, and what modules keep. Torch-free."""
