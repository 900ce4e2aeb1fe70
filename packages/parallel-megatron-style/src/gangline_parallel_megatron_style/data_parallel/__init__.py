"""Data parallelism: parameter groups in flat buffers, ZeRO sharding, and gradient reduction over ranks."""
