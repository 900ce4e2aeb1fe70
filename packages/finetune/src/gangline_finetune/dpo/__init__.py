"""Preferences: pairs of answers as data, and the loss that learns from them (Rafailov et al., arXiv 2305.18290)."""
