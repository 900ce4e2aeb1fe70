"""Models as torch-free data and as modules; the models themselves are parts.

tree       config nodes, each naming the module it builds; linear_nodes: layers that a strategy shards by itself
calls      what seams of a model compute; contracts: optional methods of modules
compose    model, then its edits; build: modules on the meta device; init: initial weights; buffers: buffers of modules
flops      operations per token
"""
