"""Communication between ranks: the `Comm` contract, its transports, and collectives for autograd.

Torch is loaded with the first module that needs torch.
"""
