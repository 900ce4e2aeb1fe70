"""Data parallelism: parameter groups in flat buffers, what ZeRO cuts of them, and gradients added over ranks."""
