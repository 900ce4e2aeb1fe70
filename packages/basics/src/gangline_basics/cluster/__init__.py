"""Machines as data: their network, and the versioned file that says what they compute, send, draw and cost."""
