"""Activation memory: bytes that the forward pass of one microbatch saves for the backward pass on one rank.

After Korthikanti et al. (arXiv 2205.05198, section 4), adapted to this decoder. RMSNorm saves its input and the
reciprocal root mean square of each row. A matmul saves its input. Fused attention saves queries, keys, values, output
and the log-sum-exp of each row and head, never the scores. SwiGLU saves both matmuls' outputs, the gate's activation
and the input of the last matmul. Under sequence parallelism, tp shards the residual stream, the norms and the inputs of
the first matmuls along tokens, and the tensors between the matmuls along heads and features.
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
    """Inputs for counting the bytes that the modules of a rank save for the backward pass.

    local  sizes passed to the methods of nodes
    gpu    whether GPU kernels are used. On a CPU a norm saves its input and a float32 copy of the input, and attention
           returns its output in another memory order than the next matmul reads, so the matmul saves a copy.
    plan   source of frozen parameters; a matmul saves its input only if its weight is trained. None: all are trained.
    """

    local: LocalSizes
    gpu: bool = True
    plan: Plan | None = None
    ulysses: int = 1  # number of ranks among which Ulysses exchanges tokens for heads

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
    """Return the bytes that a norm of `rows` rows saves. Its output is not counted, because the next operator saves it.

    With an `offset`, the sum of weight and offset is saved as well.
    """
    itemsize = sizes.itemsize if sizes.gpu else 2 * sizes.master_itemsize
    return rows * (width * itemsize + sizes.master_itemsize) + (width * sizes.itemsize if offset else 0)


def reads(node: Node, path: str, sizes: ActivationSizes, *names: str) -> bool:
    """Return whether any of the linears `names` of the node at `path` is trained or wrapped, and so saves its input."""
    return any(
        _is_wrapped(getattr(node, name)) or sizes.plan is None or not sizes.plan.is_frozen(f"{path}.{name}.weight")
        for name in names
    )


def _is_wrapped(node: Node) -> bool:
    """Return whether a linear is wrapped by a node that also reads the linear's input."""
    while isinstance(node, EightBitNode):
        node = node.inner
    return isinstance(node, WrapNode)


def count_attention(node: AttentionNode, sizes: ActivationSizes, path: str) -> int:
    """Count the bytes of x, of q, k, v after rotation, of the output and its log-sum-exp, and of q_norm and k_norm."""
    heads, key_heads = node.heads // sizes.tp, max(1, node.kv_heads // sizes.tp)
    nbytes = sizes.tokens * node.dim * sizes.itemsize if reads(node, path, sizes, "wq", "wk", "wv") else 0
    outputs = 2 if copies_output(node, sizes, heads) and reads(node, path, sizes, "wo") else 1
    copies = sizes.ulysses // gcd(sizes.ulysses, key_heads)  # number of copies of each key head over the Ulysses ranks
    nbytes += sizes.inner_tokens * ((1 + outputs) * heads + 2 * copies * key_heads) * node.head_dim * sizes.itemsize
    nbytes += sizes.inner_tokens * heads * sizes.master_itemsize
    for normed, own in ((node.q_norm, heads), (node.k_norm, key_heads)):
        if normed is not None:
            own_bytes = normed.count_activation_bytes(sizes.local)
            rows = sizes.inner_tokens * own
            nbytes += count_norm_bytes(sizes, rows, node.head_dim, normed.offset) if own_bytes is None else own_bytes
    return nbytes


def feed_forward(node: FeedForwardNode, sizes: ActivationSizes, path: str) -> int:
    """Return the bytes of x, gate, up, activated gate and gated product; clamped gating saves no activated gate."""
    inner = 2 + node.gating.plain + reads(node, path, sizes, "w_down")
    stream = sizes.tokens * node.dim if reads(node, path, sizes, "w_gate", "w_up") else 0
    return (stream + inner * sizes.inner_tokens * (node.ffn_dim // sizes.tp)) * sizes.itemsize


def count_node(node: Node, sizes: ActivationSizes, path: str = "") -> int:
    """Return the activation bytes that a node and its descendants save for the backward pass.

    `count_activation_bytes` of the node is used if it is not None; otherwise the count for the built-in module of its
    class. For an unknown class, count the input and output of each of its matrices.
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
    """Return the bytes that recomputing attention frees: the log-sum-exp, and the output if the next matmul copies it.

    Fused attention stores no scores in either case.
    """
    saving = 0
    if isinstance(node, AttentionNode):
        heads = node.heads // sizes.tp
        output = heads * node.head_dim * sizes.itemsize if copies_output(node, sizes, heads) else 0
        saving = sizes.inner_tokens * (heads * sizes.master_itemsize + output)
    return saving + sum(count_recomputed_attention(child, sizes) for _, child in iterate_children(node))


def copies_output(node: AttentionNode, sizes: ActivationSizes, heads: int) -> bool:
    """Return whether the matmul after attention saves a copy of the output, in another order or for other tokens.

    On a CPU, attention returns the output in the memory order of the queries; without rotary positions the matmul reads
    that order.
    """
    return sizes.ulysses > 1 or (not sizes.gpu and heads > 1 and node.rope is not None)


def count_angles(blocks: Iterable[Node], sizes: ActivationSizes) -> int:
    """Return the bytes of cos and sin of all positions, shared by blocks of a stage with equal rotary positions."""
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
    """Return the bytes of the head's "activations" and "logits".

    activations  the final norm's input and output, and the saved bytes of nodes that edits add next to the head
    logits       logits with their log-sum-exp, and memory of the loss's backward pass; heads that edits add also keep
                 their logits until the backward pass
    blocks: path of a recomputed block inside the head -> its saved bytes.
    """
    inside = list_beside_head(head, plan.head)
    more = sum(isinstance(node, HeadNode) for _, node in inside)
    vocabulary = -(-plan.facts.get("vocab_size", 0) // sizes.tp)
    # number of rows whose logits are in memory at a time
    rows = min(sizes.inner_tokens, plan.facts.get("loss_chunk", sizes.inner_tokens))
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
    """Return the bytes that the loss of an added head saves: the log-sum-exp, and logits that are not chunked."""
    vocabulary = -(-plan.facts.get("vocab_size", 0) // sizes.tp)
    loss_bytes = sizes.inner_tokens * (sizes.master_itemsize + 9)
    if plan.facts.get("loss_chunk", sizes.inner_tokens) < sizes.inner_tokens:
        return loss_bytes
    return loss_bytes + sizes.inner_tokens * vocabulary * sizes.itemsize


def list_beside_head(head: Node, path: str) -> list[tuple[str, Node]]:
    """Return all nodes that edits have added next to the head at `path`, with their paths."""
    return [pair for at, node in _list_beside(head, path) for pair in iterate_nodes(node, at)]


def _list_beside(head: Node, path: str) -> list[tuple[str, Node]]:
    """Return the outermost nodes that edits have added next to the head, with their paths."""
    children = list[tuple[str, Node]]()
    while isinstance(head, WrapNode):
        children += [(f"{path}.{name}", child) for name, child in iterate_children(head) if name]
        head = head.inner
    return children


def _count_within_head(node: Node, sizes: ActivationSizes, path: str, blocks: Mapping[str, int]) -> int:
    """Count bytes as `count_node` does, but 0 for an embedding, and for a head only the input of its matmul."""
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
