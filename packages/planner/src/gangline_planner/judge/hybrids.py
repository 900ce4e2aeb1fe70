"""Hybrids of Mamba-2, attention and experts (Nemotron 3), as far as their cost goes. Torch-free; nothing is built.

Their layers are mixers and experts by turns: each block here is a layer of experts with the mixers before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from gangline.model.decoder_nodes import AttentionNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Node, Shape, by_path, replaced
from gangline.plan import Cut, Plan
from gangline_planner.judge.nodes import NOWHERE

CHUNK = 128  # tokens that leave a state behind (Mamba-2, arXiv 2405.21060, section 6)


@dataclass(frozen=True)
class Hybrid:
    """What its blocks hold beside what `Shapes` says.

    mixers     of its blocks that have a Mamba-2 mixer, the first ones
    attention  of its blocks that have attention
    heads, width, groups, state  of a Mamba-2 mixer
    latent     width in which experts compute, 0: the model's own
    further    tokens that are predicted beyond the next, each by a head of its own
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
    """Mamba-2: a product in, a scan in chunks, a product out. `beside`: what else the block mixes tokens with."""

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

    def shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        if self.heads:
            found["w_in"] = (2 * self.inner + 2 * self.groups * self.state + self.heads, self.dim)
            found["w_out"] = (self.dim, self.inner)
        if self.latent:
            found |= {"latent_in": (self.latent, self.dim), "latent_out": (self.dim, self.latent)}
        return found

    def activation_bytes(self, sizes: LocalSizes) -> int:
        """The input; what the first product gives and its convolution; states of chunks in 32 bits, made and passed on;
        gate and output. The scan moves memory: what it multiplies is a hundredth of what the products do. Its kernels
        (Triton) are taken to move it half as fast as others, so that all of this counts twice.
        """
        wide = 2 * self.inner + 2 * self.groups * self.state
        states = 2 * 4 * self.inner * self.state // CHUNK
        scanned = 2 * (2 * wide + 2 * self.inner) * sizes.itemsize + 2 * states
        return sizes.tokens * self.dim * sizes.itemsize + sizes.inner_tokens * scanned // sizes.size("tp")


def as_hybrid(tree: Node, plan: Plan, hybrid: Hybrid) -> tuple[Node, Plan]:
    """A decoder whose blocks have experts, with the mixers of a hybrid."""
    at, known = f"{plan.blocks}.*.attention", by_path(tree)
    cuts = [Cut.colwise(f"{at}.w_in"), Cut.rowwise(f"{at}.w_out")]
    cuts += [Cut.colwise(f"{at}.beside.*.{name}") for name in ("wq", "wk", "wv")] + [Cut.rowwise(f"{at}.beside.*.wo")]
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
        block = replaced(block, "attention", mixer)
        if hybrid.latent:
            narrow = replace(layer, experts=replace(layer.experts, dim=hybrid.latent))
            block = replaced(block, "feed_forward", narrow)
        tree = replaced(tree, f"{plan.blocks}.{index}", block)
    return tree, plan.extended(cuts=tuple(cuts))
