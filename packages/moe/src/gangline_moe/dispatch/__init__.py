"""Rows to their experts and back: sorted by expert, and sent to the ranks that hold them.

permute        one permutation of (token, expert) pairs, used both ways; what is dropped over capacity
dispatcher     `TokenDispatcher`: both all-to-alls of a microbatch, overlapped with what runs between
all_to_all     the contract of a transfer, and the flat one: everything for a rank in one message
per_expert     a message for each expert, put where its rows belong as it arrives
hierarchical   first within each node, then between nodes
"""
