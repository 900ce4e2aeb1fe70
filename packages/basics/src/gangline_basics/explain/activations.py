"""What the forward pass of one microbatch keeps for the backward pass, in bytes on one rank.

After Korthikanti et al. (arXiv 2205.05198, section 4), adapted to this decoder: RMSNorm keeps its input and one number
a row; a product keeps its input; fused attention keeps queries, keys, values, output and one number a row and head,
never the scores; SwiGLU keeps both products, the gate's activation and what the last product reads. Under sequence
parallelism the residual stream, the norms and the inputs of the first products are cut by tp, what lies between by its
heads and features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from gangline.model.calls import LOSS_CHUNK
from gangline.model.linear_nodes import EmbeddingNode, LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Node, WrapNode, iterate_children, iterate_nodes
from gangline.plan import Plan
from gangline_basics.model.decoder_nodes import AttentionNode, FeedForwardNode, HeadNode, NormNode
from gangline_basics.model.low_bit_node import EightBitNode
from gangline_basics.model.rope_rates import Rope


@dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """What a rank's modules compute with.

    local  the sizes that nodes are asked with
    gpu    the kernels of a GPU. On a CPU a norm keeps its input and what it becomes in float32, and attention gives its
           output in another order than the product behind it reads, which keeps a copy.
    plan   what is frozen; a product keeps its input only for the gradient of its weight. None: nothing is.
    """

    local: LocalSizes
    gpu: bool = True
    plan: Plan | None = None
    ulysses: int = 1  # ranks among which Ulysses trades tokens for heads

    @property
    def tokens(self) -> int:
        return self.local.tokens

    @property
    def inner_tokens(self) -> int:
        return self.local.inner_tokens

    @property
    def itemsize(self) -> int:
        return self.local.itemsize

    @property
    def master_itemsize(self) -> int:
        return self.local.master_itemsize

    @property
    def tp(self) -> int:
        return self.local.size("tp")


def count_norm_bytes(sizes: ActivationSizes, rows: int, width: int, offset: float = 0.0) -> int:
    """Kept by a norm over `rows` rows, its output not counted: the operator that reads it keeps it.

    With an `offset` the sum with the weight is kept as well.
    """
    itemsize = sizes.itemsize if sizes.gpu else 2 * sizes.master_itemsize
    return rows * (width * itemsize + sizes.master_itemsize) + (width * sizes.itemsize if offset else 0)


def reads(node: Node, path: str, sizes: ActivationSizes, *names: str) -> bool:
    """Whether one of these linears below the node at `path` keeps its input: it is trained, or something wraps it."""
    return any(
        _is_wrapped(getattr(node, name)) or sizes.plan is None or not sizes.plan.is_frozen(f"{path}.{name}.weight")
        for name in names
    )


def _is_wrapped(node: Node) -> bool:
    """Whether something wraps this linear that reads its input, too."""
    while isinstance(node, EightBitNode):
        node = node.inner
    return isinstance(node, WrapNode)


def count_attention(node: AttentionNode, sizes: ActivationSizes, path: str) -> int:
    """x, then q, k, v after rotation, the output and its log-sum-exp; with q_norm and k_norm what these keep."""
    heads, key_heads = node.heads // sizes.tp, max(1, node.kv_heads // sizes.tp)
    nbytes = sizes.tokens * node.dim * sizes.itemsize if reads(node, path, sizes, "wq", "wk", "wv") else 0
    outputs = 2 if copies_output(node, sizes, heads) and reads(node, path, sizes, "wo") else 1
    copies = sizes.ulysses // gcd(sizes.ulysses, key_heads)  # of key heads that its ranks do not divide
    nbytes += sizes.inner_tokens * ((1 + outputs) * heads + 2 * copies * key_heads) * node.head_dim * sizes.itemsize
    nbytes += sizes.inner_tokens * heads * sizes.master_itemsize
    for normed, own in ((node.q_norm, heads), (node.k_norm, key_heads)):
        if normed is not None:
            own_bytes = normed.count_activation_bytes(sizes.local)
            rows = sizes.inner_tokens * own
            nbytes += count_norm_bytes(sizes, rows, node.head_dim, normed.offset) if own_bytes is None else own_bytes
    return nbytes


def feed_forward(node: FeedForwardNode, sizes: ActivationSizes, path: str) -> int:
    """x, then gate, up, the activated gate and their product; where products are bounded no activated gate."""
    inner = 2 + node.gating.plain + reads(node, path, sizes, "w_down")
    stream = sizes.tokens * node.dim if reads(node, path, sizes, "w_gate", "w_up") else 0
    return (stream + inner * sizes.inner_tokens * (node.hidden // sizes.tp)) * sizes.itemsize


def count_node(node: Node, sizes: ActivationSizes, path: str = "") -> int:
    """Return the bytes that the node at `path` and all nodes in it save: as `activation_bytes` says, else as modules of
    gangline-basics do. A node of an unknown kind is counted with the input and output of each of its matrices.
    """
    below = [(child, f"{path}.{name}" if name else path) for name, child in iterate_children(node)]
    own_bytes = node.count_activation_bytes(sizes.local)
    if own_bytes is not None:
        return own_bytes + sum(count_node(child, sizes, at) for child, at in below)
    if isinstance(node, NormNode):
        return count_norm_bytes(sizes, sizes.tokens, node.dim, node.offset)
    if isinstance(node, AttentionNode | FeedForwardNode):
        own = count_attention(node, sizes, path) if isinstance(node, AttentionNode) else feed_forward(node, sizes, path)
        return own + sum(count_node(child, sizes, at) for child, at in below if isinstance(child, WrapNode))
    matrices = [node.get_shapes(), *(child.get_shapes() for child, _ in below if isinstance(child, LinearNode))]
    nbytes = sum(count_node(child, sizes, at) for child, at in below)
    for shape in (shape for shapes in matrices for shape in shapes.values()):
        if len(shape) > 1:
            nbytes += sizes.inner_tokens * sum(shape[-2:]) * sizes.itemsize
    return nbytes


def count_recomputed_attention(node: Node, sizes: ActivationSizes) -> int:
    """What recomputing attention saves: the log-sum-exp, and where it is not the one that the next product keeps, the
    output. Fused attention keeps no scores.
    """
    saving = 0
    if isinstance(node, AttentionNode):
        heads = node.heads // sizes.tp
        output = heads * node.head_dim * sizes.itemsize if copies_output(node, sizes, heads) else 0
        saving = sizes.inner_tokens * (heads * sizes.master_itemsize + output)
    return saving + sum(count_recomputed_attention(child, sizes) for _, child in iterate_children(node))


def copies_output(node: AttentionNode, sizes: ActivationSizes, heads: int) -> bool:
    """Whether the product behind attention keeps a copy of its output: in another order, or of other tokens.

    A CPU gives it in the order of the queries, and those that are not rotated lie as the product behind reads them.
    """
    return sizes.ulysses > 1 or (not sizes.gpu and heads > 1 and node.rope is not None)


def count_angles(blocks: Iterable[Node], sizes: ActivationSizes) -> int:
    """cos and sin of every position, which all blocks of a stage share that rotate alike."""
    ropes = {
        (rope, rope.width or node.head_dim)  # type: ignore[attr-defined]
        for block in blocks
        for _, node in iterate_nodes(block)
        if isinstance(rope := getattr(node, "rope", None), Rope)
    }
    return sizes.inner_tokens * sum(width for _, width in ropes) * sizes.master_itemsize


def count_head(
    plan: Plan, width: int, sizes: ActivationSizes, head: Node, blocks: Mapping[str, int] | None = None
) -> dict[str, int]:
    """The last norm's input and output; logits with their log-sum-exp; and what the loss's backward pass takes.

    What edits put beside the head may have heads of its own: their logits are there until the backward pass, too.
    blocks: by the path of a block inside the head what it keeps, where that is not all that it makes (recomputation).
    """
    inside = list_beside_head(head, plan.head)
    more = sum(isinstance(node, HeadNode) for _, node in inside)
    vocabulary = -(-plan.facts.get("vocab_size", 0) // sizes.tp)
    rows = min(sizes.inner_tokens, plan.facts.get("loss_chunk", sizes.inner_tokens))  # that have logits at a time
    stream = count_norm_bytes(sizes, sizes.tokens, width) + sizes.tokens * width * sizes.itemsize
    logits = rows * vocabulary * sizes.itemsize
    loss_bytes = sizes.inner_tokens * (sizes.master_itemsize + 9)
    each = count_further_loss(plan, sizes)
    return {
        "activations": stream
        + sum(_count_within_head(node, sizes, path, blocks or {}) for path, node in _list_beside(head, plan.head)),
        "logits": 2 * logits
        + loss_bytes
        + more * each
        + 2 * min(rows * vocabulary, LOSS_CHUNK) * sizes.master_itemsize,
    }


def count_further_loss(plan: Plan, sizes: ActivationSizes) -> int:
    """What a loss beside that of the head keeps: its log-sum-exp, and its logits where it has all of them at once."""
    vocabulary = -(-plan.facts.get("vocab_size", 0) // sizes.tp)
    loss_bytes = sizes.inner_tokens * (sizes.master_itemsize + 9)
    if plan.facts.get("loss_chunk", sizes.inner_tokens) < sizes.inner_tokens:
        return loss_bytes
    return loss_bytes + sizes.inner_tokens * vocabulary * sizes.itemsize


def list_beside_head(head: Node, path: str) -> list[tuple[str, Node]]:
    """All nodes that edits have put beside the head at `path`, with their paths."""
    return [pair for at, node in _list_beside(head, path) for pair in iterate_nodes(node, at)]


def _list_beside(head: Node, path: str) -> list[tuple[str, Node]]:
    """What lies beside the head where edits wrap it, with its path."""
    children = list[tuple[str, Node]]()
    while isinstance(head, WrapNode):
        children += [(f"{path}.{name}", child) for name, child in iterate_children(head) if name]
        head = head.inner
    return children


def _count_within_head(node: Node, sizes: ActivationSizes, path: str, blocks: Mapping[str, int]) -> int:
    """As `count_node`; a lookup is counted by what is around it, of a head what its product reads: logits are apart."""
    if path in blocks:
        return blocks[path]
    if isinstance(node, EmbeddingNode):
        return 0
    own = (
        sizes.tokens * node.dim * sizes.itemsize
        if isinstance(node, HeadNode)
        else node.count_activation_bytes(sizes.local)
    )
    if own is None:
        return count_node(node, sizes, path)
    return own + sum(
        _count_within_head(child, sizes, f"{path}.{name}", blocks) for name, child in iterate_children(node)
    )
