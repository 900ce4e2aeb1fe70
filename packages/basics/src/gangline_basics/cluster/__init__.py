"""Cluster descriptions: the network, and a versioned file with compute, bandwidth, power and cost of a node."""
