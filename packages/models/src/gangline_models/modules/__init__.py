"""Modules that the decoder of gangline-basics lacks, one file each: single-device code without ranks."""
