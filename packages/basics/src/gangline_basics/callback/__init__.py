"""Callbacks: averages of the weights, profiles."""
