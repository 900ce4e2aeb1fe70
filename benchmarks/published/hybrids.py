"""Count the costs of hybrids of Mamba-2, attention and experts (Nemotron 3). Imports no torch.

Layers of these models are mixers and experts in turn. Here a block is a layer of experts with the mixers before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Node, Shape, map_paths, replace_node
from gangline.plan import Plan, ShardRule
from gangline_basics.model.decoder_nodes import AttentionNode
from published.nodes import NOWHERE

CHUNK = 128  # number of tokens per stored state (Mamba-2, arXiv 2405.21060, section 6)


@dataclass(frozen=True)
class Hybrid:
    """Contents of blocks, in addition to `Shapes`.

    mixers     number of blocks with a Mamba-2 mixer, the first ones
    attention  number of blocks with attention, the last ones
    heads, width, groups, state  sizes of a Mamba-2 mixer
    latent     width of the experts' input and output; 0: the width of the model
    further    number of tokens predicted after the next token, each by a separate head
    """

    mixers: int
    attention: int
    heads: int
    width: int = 64
    groups: int = 8
    state: int = 128
    latent: int = 0
    further: int = 0


@dataclass(frozen=True, kw_only=True)
class MambaNode(Node):
    """Mamba-2: an input projection, a chunked scan, an output projection. beside: attention in the same block"""

    module: ClassVar[str] = NOWHERE
    dim: int
    heads: int
    width: int
    groups: int
    state: int
    latent: int = 0
    beside: tuple[Node, ...] = field(default=())

    @property
    def inner(self) -> int:
        return self.heads * self.width

    def get_shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        if self.heads:
            found["w_in"] = (2 * self.inner + 2 * self.groups * self.state + self.heads, self.dim)
            found["w_out"] = (self.dim, self.inner)
        if self.latent:
            found |= {"latent_in": (self.latent, self.dim), "latent_out": (self.dim, self.latent)}
        return found

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the saved bytes: input, outputs of the first matmul and of the convolution, states, gate and output.

        Chunk states are in 32 bits, computed and passed on. The scan is bound by memory bandwidth: its FLOPs are a
        hundredth of those of the matmuls. Its kernels (Triton) are assumed to reach half the bandwidth of other
        kernels, so all its bytes count twice.
        """
        wide = 2 * self.inner + 2 * self.groups * self.state
        states = 2 * 4 * self.inner * self.state // CHUNK
        scanned = 2 * (2 * wide + 2 * self.inner) * sizes.itemsize + 2 * states
        return sizes.tokens * self.dim * sizes.itemsize + sizes.inner_tokens * scanned // sizes.size("tp")


def as_hybrid(tree: Node, plan: Plan, hybrid: Hybrid) -> tuple[Node, Plan]:
    """Return a hybrid: put its mixers into a decoder whose blocks have experts."""
    at, known = f"{plan.blocks}.*.attention", map_paths(tree)
    sharding = [ShardRule.colwise(f"{at}.w_in"), ShardRule.rowwise(f"{at}.w_out")]
    sharding += [ShardRule.colwise(f"{at}.beside.*.{name}") for name in ("wq", "wk", "wv")] + [
        ShardRule.rowwise(f"{at}.beside.*.wo")
    ]
    for index in range(plan.layers):
        block = known[f"{plan.blocks}.{index}"]
        attention, layer = (getattr(block, name) for name in ("attention", "feed_forward"))
        assert isinstance(attention, AttentionNode)
        mixer = MambaNode(
            dim=attention.dim,
            heads=hybrid.heads if index < hybrid.mixers else 0,
            width=hybrid.width,
            groups=hybrid.groups,
            state=hybrid.state,
            latent=hybrid.latent,
            beside=(attention,) if index >= plan.layers - hybrid.attention else (),
        )
        block = replace_node(block, "attention", mixer)
        if hybrid.latent:
            narrow = replace(layer, experts=replace(layer.experts, dim=hybrid.latent))
            block = replace_node(block, "feed_forward", narrow)
        tree = replace_node(tree, f"{plan.blocks}.{index}", block)
    return tree, plan.extend(sharding=tuple(sharding))
