"""What the forward pass of one micro-batch keeps for the backward pass, in bytes on one rank.

After Korthikanti et al. (arXiv 2205.05198, section 4), adapted to this decoder: RMSNorm keeps its input and one number
a row; a product keeps its input; fused attention keeps queries, keys, values, output and one number a row and head,
never the scores; SwiGLU keeps both products, the gate's activation and what the last product reads. Under sequence
parallelism the residual stream, the norms and the inputs of the first products are cut by tp, what lies between by its
heads and features.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from gangline.config.schema import Recompute
from gangline.model.tree import AttentionNode, FeedForwardNode, Here, LinearNode, Node, NormNode, WrapNode, children
from gangline.plan import Plan
from gangline_parallel_megatron_style.cost.case import Case

CHUNK = 1 << 25  # elements of logits that the loss has in float32 at a time (gangline.model.loss)


@dataclass(frozen=True, kw_only=True)
class Rates(Here):
    """What a rank's modules compute with.

    gpu: the kernels of a GPU. On a CPU a norm keeps its input and what it becomes in float32, and attention gives its
    output in another order than the product behind it reads, which keeps a copy.
    plan: what is frozen; a product keeps its input only for the gradient of its weight. None: nothing is.
    """

    gpu: bool = True
    plan: Plan | None = None
    ulysses: int = 1  # ranks among which Ulysses trades tokens for heads

    @classmethod
    def of(cls, case: Case, gpu: bool = True) -> Rates:
        ulysses = case.cp if case.config.context == "ulysses" else 1
        return cls(**vars(case.here), gpu=gpu, plan=case.plan, ulysses=ulysses)

    @property
    def tp(self) -> int:
        return self.size("tp")


def norm(rates: Rates, rows: int, width: int) -> int:
    """Kept by a norm over `rows` rows, its output not counted: that is kept by whoever reads it."""
    kept = rates.nbytes if rates.gpu else 2 * rates.wide
    return rows * (width * kept + rates.wide)


def reads(node: Node, path: str, rates: Rates, *names: str) -> bool:
    """Whether one of these linears below the node at `path` keeps its input: it is trained, or something wraps it."""
    return any(
        isinstance(getattr(node, name), WrapNode)
        or rates.plan is None
        or not rates.plan.is_frozen(f"{path}.{name}.weight")
        for name in names
    )


def attention(node: AttentionNode, rates: Rates, path: str) -> int:
    """x, then q, k, v after rotation, the output and its log-sum-exp; with q_norm and k_norm what these keep."""
    heads, key_heads = node.heads // rates.tp, max(1, node.kv_heads // rates.tp)
    kept = rates.tokens * node.dim * rates.nbytes if reads(node, path, rates, "wq", "wk", "wv") else 0
    outputs = 2 if copies_output(rates, heads) and reads(node, path, rates, "wo") else 1
    copies = rates.ulysses // gcd(rates.ulysses, key_heads)  # of key heads that its ranks do not divide
    kept += rates.inner * ((1 + outputs) * heads + 2 * copies * key_heads) * node.head_dim * rates.nbytes
    kept += rates.inner * heads * rates.wide
    for normed, own in ((node.q_norm, heads), (node.k_norm, key_heads)):
        if normed is not None:
            kept += norm(rates, rates.inner * own, node.head_dim)
    return kept


def feed_forward(node: FeedForwardNode, rates: Rates, path: str) -> int:
    """x, then gate, up, the activated gate and their product."""
    inner = 4 if reads(node, path, rates, "w_down") else 3
    stream = rates.tokens * node.dim if reads(node, path, rates, "w_gate", "w_up") else 0
    return (stream + inner * rates.inner * (node.hidden // rates.tp)) * rates.nbytes


def of_node(node: Node, rates: Rates, path: str = "") -> int:
    """Kept by the node at `path` and all in it: as it says, or as core's modules do. One of an unknown kind that says
    nothing is taken to keep what goes in and out of each matrix.
    """
    below = [(child, f"{path}.{name}" if name else path) for name, child in children(node)]
    said = node.keeps(rates)
    if said is not None:
        return said + sum(of_node(child, rates, at) for child, at in below)
    if isinstance(node, NormNode):
        return norm(rates, rates.tokens, node.dim)
    if isinstance(node, AttentionNode | FeedForwardNode):
        own = attention(node, rates, path) if isinstance(node, AttentionNode) else feed_forward(node, rates, path)
        return own + sum(of_node(child, rates, at) for child, at in below if isinstance(child, WrapNode))
    matrices = [node.shapes(), *(child.shapes() for child, _ in below if isinstance(child, LinearNode))]
    kept = sum(of_node(child, rates, at) for child, at in below)
    for shape in (shape for shapes in matrices for shape in shapes.values()):
        if len(shape) > 1:
            kept += rates.inner * sum(shape[-2:]) * rates.nbytes
    return kept


def of_block(case: Case, index: int, rates: Rates) -> int:
    """Kept by a block until its backward pass, as the run recomputes it."""
    node = case.blocks[index]
    whole = of_node(node, rates, f"{case.plan.blocks}.{index}")
    if not case.recomputed(index):
        return whole
    if case.recompute is Recompute.full:
        return min(whole, rates.tokens * case.width * rates.nbytes)
    return whole - recomputed_attention(node, rates)


def recomputed_attention(node: Node, rates: Rates) -> int:
    """What recomputing attention saves: the log-sum-exp, and where it is not the one that the next product keeps, the
    output. Fused attention keeps no scores.
    """
    saved = 0
    if isinstance(node, AttentionNode):
        heads = node.heads // rates.tp
        output = heads * node.head_dim * rates.nbytes if copies_output(rates, heads) else 0
        saved = rates.inner * (heads * rates.wide + output)
    return saved + sum(recomputed_attention(child, rates) for _, child in children(node))


def copies_output(rates: Rates, heads: int) -> bool:
    """Whether the product behind attention keeps a copy of its output: in another order, or of other tokens."""
    return rates.ulysses > 1 or (not rates.gpu and heads > 1)


def angles(case: Case, rates: Rates) -> int:
    """cos and sin of every position, which all blocks of a stage share."""
    width = case.plan.facts.get("head_dim", 0)
    return rates.inner * width * rates.wide


def head(case: Case, rates: Rates) -> dict[str, int]:
    """The last norm's input and output; logits with their log-sum-exp; and what the loss's backward pass takes."""
    vocabulary = -(-case.plan.facts.get("vocab_size", 0) // rates.tp)
    stream = norm(rates, rates.tokens, case.width) + rates.tokens * case.width * rates.nbytes
    logits = rates.inner * vocabulary * rates.nbytes
    return {
        "activations": stream,
        "logits": 2 * logits + rates.inner * (rates.wide + 9) + 2 * min(rates.inner * vocabulary, CHUNK) * rates.wide,
    }
