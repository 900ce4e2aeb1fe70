"""The parts of the group `moe`: one edit with the shapes that models were published with. Torch-free."""

from __future__ import annotations

from gangline.parts import Part
from gangline_moe.config import MoeOptions

BUILD = "gangline_moe.edit:edit"


def _part(name: str, config: type, summary: str, router: str = "softmax") -> Part:
    return Part(group="moe", name=name, config=config, build=BUILD, summary=summary, opens={"router": router})


PARTS = (_part("on", MoeOptions, "feed-forward layers become mixtures of experts"),)
