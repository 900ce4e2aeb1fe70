"""Dispatch of token rows: sort rows by expert, send them to the ranks of the experts, and send the outputs back.

permute        permutation of (token, expert) pairs for dispatch and combine; drops pairs over capacity
dispatcher     `TokenDispatcher`: both all-to-alls of a microbatch, overlapped with other computation
all_to_all     interface of an all-to-all, and the flat all-to-all: one message per rank
per_expert     all-to-all with one message per expert, received at the final offset of its rows
hierarchical   all-to-all first within each node, then between nodes
"""
