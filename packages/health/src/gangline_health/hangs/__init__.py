"""Ranks that do not come on: found from outside, by their pulses."""
