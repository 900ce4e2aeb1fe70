"""Options of the model edit `moe`. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gangline.errors import Problem
from gangline.mesh import AXES
from gangline.parts import EditConfig
from gangline_moe.routers.config import RouterConfig, Softmax

if TYPE_CHECKING:
    from gangline.config.schema import Run

FOLD = "ep"  # the axis that experts live on, made of ranks of others


@dataclass
class MoeOptions(EditConfig):
    """Feed-forward layers become `experts` smaller ones, of which a router gives each token `top_k`."""

    experts: int = 8  # in each layer
    top_k: int = 2  # experts that each token goes through
    hidden: int | None = None  # width of an expert; null: the feed-forward's / top_k, so that a token costs the same
    shared: int = 0  # experts that every token goes through beside the routed ones
    first: int = 0  # the first block with experts; those before it stay as they are
    every: int = 1  # of every so many blocks from there one has experts
    router: RouterConfig = field(default_factory=Softmax)
    capacity_factor: float | None = None  # an expert takes at most this times the mean load; null: all that comes
    ep: int | None = None  # ranks that share the experts of a layer; null: as many as divide both
    ep_out_of: list[str] = field(default_factory=lambda: ["dp_shard", "cp"])  # the mesh axes those ranks are taken of

    def check(self, run: Run) -> list[Problem]:
        return list(self._problems())

    def _problems(self) -> Iterator[Problem]:
        least = {"experts": 1, "top_k": 1, "hidden": 1, "shared": 0, "first": 0, "every": 1, "ep": 1}
        small = {name: value for name in least if (value := getattr(self, name)) is not None and value < least[name]}
        for name, value in small.items():
            yield Problem(f"moe.{name}={value} must be at least {least[name]}.")
        if small:
            return
        if self.top_k > self.experts:
            what = f"moe.top_k={self.top_k} is more than moe.experts={self.experts}."
            yield Problem(what, "A token goes through each expert at most once.", f"moe.top_k={self.experts} or less.")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            yield Problem(
                f"moe.capacity_factor={self.capacity_factor} leaves no room for any token.",
                "An expert takes at most capacity_factor x tokens x top_k / experts tokens of a micro-batch.",
                "moe.capacity_factor=1.25, or null to drop nothing.",
            )
        if self.ep is not None and self.experts % self.ep:
            yield Problem(
                f"moe.ep={self.ep} does not divide moe.experts={self.experts}.",
                "Every rank of ep holds as many experts.",
                f"Choose moe.ep among {_divisors(self.experts)}.",
            )
        wrong = [axis for axis in self.ep_out_of if axis not in AXES or axis == "pp"]
        if wrong or not self.ep_out_of:
            named = ", ".join(wrong) or "none"
            yield Problem(
                f"moe.ep_out_of cannot take ranks of {named}.",
                "" if "pp" not in wrong else "The ranks along pp hold different layers.",
                f"Choose among {', '.join(axis for axis in AXES if axis != 'pp')}.",
            )


def _divisors(number: int) -> str:
    return ", ".join(str(value) for value in range(1, number + 1) if number % value == 0)
