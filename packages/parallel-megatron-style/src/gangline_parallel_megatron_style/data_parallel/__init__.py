"""Data parallelism: parameter groups in flat buffers, ZeRO sharding, and the reduction of gradients over ranks."""
