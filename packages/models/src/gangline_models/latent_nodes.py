"""Config nodes of latent attention (MLA). Torch-free; the formulas are in `gangline_models.modules.latent`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gangline.model.calls import AttentionCall, Call
from gangline.model.linear_nodes import LINEAR, fit_linears
from gangline.model.local_sizes import CommVolume, LocalSizes
from gangline.model.matmuls import AnyMatmul, AttentionMatmuls
from gangline.model.tree import Decoding, Node
from gangline_basics.model.attention_backend import AttentionBackend
from gangline_basics.model.decoder_nodes import NormNode
from gangline_basics.model.rope_rates import Rope


@dataclass(frozen=True, kw_only=True)
class LatentUpNode(Node):
    """Config node of norm and up-projection of a latent vector, with `down` also of its down-projection from x."""

    module: ClassVar[str] = "gangline_models.modules.latent:LatentUp"
    dim: int
    rank: int
    out: int
    down: Node | None = None
    norm: NormNode
    up: Node = LINEAR

    def __post_init__(self) -> None:
        sizes = {"up": (self.rank, self.out)}
        fit_linears(self, sizes if self.down is None else sizes | {"down": (self.dim, self.rank)})

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of the input of `up`; the norm counts its own input."""
        return sizes.tokens * self.rank * sizes.itemsize


@dataclass(frozen=True, kw_only=True)
class MlaNode(Node):
    """Config node of multi-head latent attention: query and key heads have width nope_dim + rope_dim, values v_dim.

    wq           query projection if queries have no latent vector; otherwise `q` projects them
    interleaved  true if RoPE rotates pairs of neighbouring features; false: pairs of features rope_dim / 2 apart
    backend      kernels of the process that computes the attention
    """

    module: ClassVar[str] = "gangline_models.modules.latent:LatentAttention"
    dim: int
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope
    interleaved: bool
    scale: float
    wq: Node | None = None
    q: LatentUpNode | None = None
    wkv_a: Node = LINEAR
    kv: LatentUpNode
    wo: Node = LINEAR
    backend: AttentionBackend = "auto"

    def __post_init__(self) -> None:
        sizes = {"wkv_a": (self.dim, self.kv.rank + self.rope_dim), "wo": (self.heads * self.v_dim, self.dim)}
        fit_linears(self, sizes if self.wq is None else sizes | {"wq": (self.dim, self.heads * self.head_dim)})

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        return self.nope_dim + self.rope_dim

    def count_flops(self, sequence_length: int) -> int:
        """Return the FLOPs per token of q·k and p·v, with all `sequence_length` keys."""
        return 2 * self.heads * (self.head_dim + self.v_dim) * sequence_length

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...] | None:
        """Return the attention matmuls; None if queries and values differ in width, which a matmul cannot describe."""
        if self.head_dim != self.v_dim:
            return None
        heads, width = self.heads, self.head_dim
        return (AttentionMatmuls.of_tokens(sizes.tokens, sequence_length, heads=heads, kv_heads=heads, head_dim=width),)

    @property
    def call(self) -> AttentionCall:
        """Call at the seam `attention`."""
        return AttentionCall(scale=self.scale)

    def get_seams(self) -> Mapping[str, Call]:
        return {"attention": self.call}

    def get_decoding(self) -> Decoding | None:
        return "cached"

    def list_volumes(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        """Return the tp volume of the key that all heads share: gradient sum, and all-gather if tokens are sharded."""
        ranks = sizes.size("tp")
        if ranks == 1:
            return ()
        once = sizes.inner_tokens * self.rope_dim * sizes.itemsize * (ranks - 1) // ranks
        cut = sizes.tokens != sizes.inner_tokens
        volume = CommVolume(
            fold="tp",
            what="the key that all heads share",
            forward=(1, once) if cut else (0, 0),
            backward=(1, once if cut else 2 * once),
        )
        return (volume,)

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of the saved activations.

        Saved are x; rotated queries and keys; the output of `kv.up` (values and unrotated keys); the attention output
        and its log-sum-exp. The key that all heads share is stored with the latent vector, which a norm saves. If
        values and keys differ in width, all are padded to one width, and W_O saves a copy of the output.
        """
        heads = self.heads // sizes.size("tp")
        inner = 2 * self.head_dim + self.nope_dim + 2 * self.v_dim
        if self.head_dim != self.v_dim:
            inner = 4 * max(self.head_dim, self.v_dim) + self.v_dim
        elements = sizes.tokens * (self.dim + self.rope_dim) + sizes.inner_tokens * heads * inner
        return elements * sizes.itemsize + sizes.inner_tokens * heads * sizes.master_itemsize
