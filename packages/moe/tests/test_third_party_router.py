"""Router of a third-party plugin, chosen by its name."""

from __future__ import annotations

import pytest
import torch

from gangline.errors import UserError
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline_testkit import as_installed
from gangline_testkit.inputs import make_full_batch
from gangline_testkit.runs import build_small_run

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from gangline import Part, hookimpl
from gangline_moe.nodes import RouterNode
from gangline_moe.routers.config import RouterConfig


@dataclass
class Turns(RouterConfig):
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class TurnsNode(RouterNode):
    module: ClassVar[str] = "turning_modules:TurnsRouter"
    first: int


def build(config, *, dim, experts, top_k):
    return TurnsNode(dim=dim, experts=experts, top_k=top_k, first=config.first)


@hookimpl
def gangline_parts():
    yield Part(group="moe/router", name="turns", config=Turns, build="turning:build", summary="consecutive experts")
"""
MODULES = """
import torch
from gangline_moe.routers.base import Choice, Router


class TurnsRouter(Router):
    def choose(self, logits_NE):
        N, E = logits_NE.shape
        expert_N1 = (torch.arange(N)[:, None] + self.node.first) % E
        prob_NE = logits_NE.softmax(-1)
        return Choice(expert_N1, prob_NE.gather(1, expert_N1), prob_NE, logits_NE)
"""


def test_third_party_router_is_chosen_by_name(tmp_path):
    (tmp_path / "turning.py").write_text(PLUGIN)
    (tmp_path / "turning_modules.py").write_text(MODULES)
    with as_installed("gangline-turning", "turning", path=tmp_path):
        run = build_small_run("moe=on", "moe/router=turns", "moe.router.first=3", "moe.experts=4")
        tree, plan = compose_model(run)
        model = make_whole_model(tree, plan, seed=0)
        router = model.blocks[0].feed_forward.router
        assert router(torch.zeros(1, 5, 24)).expert_Nk.flatten().tolist() == [3, 0, 1, 2, 3]
        batch = make_full_batch(torch.zeros(2, 6, dtype=torch.int64))
        assert model.compute_logits(batch).isfinite().all()
        with pytest.raises(UserError, match=r"Installed choices for moe/router: .*turns"):
            build_small_run("moe=on", "moe/router=none")
