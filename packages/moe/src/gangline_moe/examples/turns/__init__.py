# gangline_turns/__init__.py: a router with consecutive experts. train moe=on moe/router=turns
from dataclasses import dataclass
from typing import ClassVar

from gangline import Part, hookimpl
from gangline.config import NonNegativeInt
from gangline_moe.nodes import RouterNode
from gangline_moe.routers.config import RouterConfig


@dataclass
class Turns(RouterConfig):
    first: NonNegativeInt = 0  # offset of a token's first expert from its highest-scoring expert


@dataclass(frozen=True, kw_only=True)
class TurnsNode(RouterNode):
    module: ClassVar[str] = "gangline_turns.modules:TurnsRouter"
    first: int


def build(config, *, dim, experts, top_k):
    return TurnsNode(dim=dim, experts=experts, top_k=top_k, first=config.first)


@hookimpl
def gangline_parts():
    yield Part(
        group="moe/router", name="turns", config=Turns, build="gangline_turns:build", summary="consecutive experts"
    )
