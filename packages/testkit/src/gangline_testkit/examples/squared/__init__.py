# gangline_squared/__init__.py: a decoder whose feed-forwards compute relu(x)^2 without a gate. train model=squared
# (Primer: So et al., arXiv 2109.08668)
from dataclasses import dataclass, replace
from typing import ClassVar

from gangline import Part, hookimpl
from gangline.model.linear_nodes import LINEAR, fit_linears
from gangline.model.tree import Node
from gangline_basics.model.config import Tiny
from gangline_basics.model.decoder_tree import build_attention, build_block
from gangline_basics.model.plan import plan_family


@dataclass(frozen=True, kw_only=True)
class SquaredNode(Node):
    module: ClassVar[str] = "gangline_squared.modules:SquaredFeedForward"
    dim: int
    ffn_dim: int
    w_up: Node = LINEAR  # child nodes, so that edits can replace linears or wrap them in adapters
    w_down: Node = LINEAR

    def __post_init__(self):
        fit_linears(self, {"w_up": (self.dim, self.ffn_dim), "w_down": (self.ffn_dim, self.dim)})


@dataclass
class Squared(Tiny):
    """Options of the model, equal to those of `tiny`."""


def build(config, run):
    feed_forward = SquaredNode(dim=config.dim, ffn_dim=config.ffn_dim)

    def make_block(index):
        return build_block(config, build_attention(config, index, run), feed_forward=feed_forward)

    tree, plan = plan_family(config, make_block)
    return tree, replace(plan, names=())  # no Hugging Face architecture has this layer


@hookimpl
def gangline_models():
    yield Part(name="squared", config=Squared, build="gangline_squared:build", summary="relu(x)^2 in feed-forwards")
