"""What a checkpointer imports: its contract, the arrays that it keeps, and which checkpoints may go.

Torch is loaded with the first name that needs it.
"""
