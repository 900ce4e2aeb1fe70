"""Recipes: runs by name, `train recipe=<file>`. A recipe is a config.yaml that leaves most options out."""
