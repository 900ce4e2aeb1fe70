"""Modules that gangline-basics lacks, one file each: single-device code without explicit parallelism."""
