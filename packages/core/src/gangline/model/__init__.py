"""The model: a decoder-only transformer as single-device code, and the torch-free data that lies beside it.

tree       what a model is made of: config nodes, each naming the module it builds; decoder_nodes: the decoder's
config     the options that users set: `model=tiny model.dim=96`; presets: published sizes, `model=llama3-8b`, ...
plan       a configuration's tree and its `gangline.plan.Plan`
compose    model, then its edits; build: the modules on the meta device; init: their first weights; buffers: each once
decoder    embed, blocks, head; block, attention, rope, norm, feed_forward, head, loss, linear hold one idea each
kept       frozen weights in fewer bits; kept_node: which, and the node around a linear of codes
flops      what a token costs
"""
