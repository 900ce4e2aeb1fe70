"""Clusters as data: the network, and the versioned file of compute, bandwidth, power and cost of a machine."""
