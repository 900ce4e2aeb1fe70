"""Ranks talking to ranks: the `Comm` contract, its transports, and collectives that autograd knows.

Torch is loaded with the first name that needs it.
"""
