# gangline_turns/__init__.py: tokens go to the experts in turn, whatever they hold. train moe=on moe/router=turns
from dataclasses import dataclass
from typing import ClassVar

from gangline import Part, hookimpl
from gangline.config import NonNegativeInt
from gangline_moe.nodes import RouterNode
from gangline_moe.routers.config import RouterConfig


@dataclass
class Turns(RouterConfig):
    first: NonNegativeInt = 0  # expert of the first token


@dataclass(frozen=True, kw_only=True)
class TurnsNode(RouterNode):
    module: ClassVar[str] = "gangline_turns.modules:TurnsRouter"
    first: int


def build(config, *, dim, experts, top_k):
    return TurnsNode(dim=dim, experts=experts, top_k=top_k, first=config.first)


@hookimpl
def gangline_parts():
    yield Part(
        group="moe/router", name="turns", config=Turns, build="gangline_turns:build", summary="One after another"
    )
