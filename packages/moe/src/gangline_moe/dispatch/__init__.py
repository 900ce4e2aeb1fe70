"""Dispatch of token rows to their experts and back: sorted by expert, and sent to the ranks that hold them.

permute        one permutation of (token, expert) pairs, used both ways; drops over capacity
dispatcher     `TokenDispatcher`: both all-to-alls of a microbatch, overlapped with what runs between
all_to_all     the contract of a transfer, and the flat one: one message per rank
per_expert     one message per expert, received at the place of its rows
hierarchical   first within each node, then between nodes
"""
