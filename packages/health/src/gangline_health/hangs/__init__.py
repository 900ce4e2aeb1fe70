"""Hang detection: finds hung ranks from another process, by the pulses of the ranks."""
