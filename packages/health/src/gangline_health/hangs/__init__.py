"""Hang detection: finds hung ranks from outside, by their pulses."""
