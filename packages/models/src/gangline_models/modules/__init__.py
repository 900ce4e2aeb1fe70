"""Modules that the decoder of gangline-basics lacks, a file each: single-device code that knows nothing of ranks."""
