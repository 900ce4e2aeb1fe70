"""RoPE scaling for longer contexts: the group `model/rope`, one file per method."""
