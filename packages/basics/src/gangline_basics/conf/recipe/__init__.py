"""Whole runs by name: `train recipe=<file>`. A recipe is a config.yaml with most of it left out."""
