"""What a model is made of, as torch-free data and as modules; the models themselves are parts.

tree       config nodes, each naming the module it builds; linear_nodes: those that a strategy cuts by itself
calls      what the calls at a model's seams compute; contracts: what a module may have
compose    model, then its edits; build: the modules on the meta device; init: their first weights; buffers: each once
flops      what a token costs
"""
