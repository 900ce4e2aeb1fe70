"""Custom modules: a parameter that their node does not declare is refused; buffers and shared modules are free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.model.build import build_model, construct
from gangline.model.compose import compose_model
from gangline.model.linear_nodes import LINEAR, LinearNode
from gangline.model.tree import Node


@dataclass(frozen=True, kw_only=True)
class Stranger(Node):
    """Node that declares the parameter shapes `said`."""

    module: ClassVar[str] = f"{__name__}:Gate"
    said: tuple[tuple[str, tuple[int, ...]], ...] = ()
    inner: Node = LINEAR

    def get_shapes(self):
        return dict(self.said)


class Gate(nn.Module):
    def __init__(self, node):
        super().__init__()
        self.inner = construct(node.inner)
        self.gate = nn.Parameter(torch.empty(3, 4))


class Beside(nn.Module):
    def __init__(self, node):
        super().__init__()
        self.inner, self.proj = construct(node.inner), nn.Linear(2, 3)


class Buffers(nn.Module):
    def __init__(self, node):
        super().__init__()
        self.inner = construct(node.inner)
        self.register_buffer("counts", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


class Shares(nn.Module):
    def __init__(self, node):
        super().__init__()
        self.inner = construct(node.inner)
        self.again, self.weight = self.inner, self.inner.weight


class Renames(nn.Module):
    def __init__(self, node):
        super().__init__()
        self.wrapped = construct(node.inner)


def built(module: type[nn.Module], **said: tuple[int, ...]) -> nn.Module:
    """Build the model of a run in which a node for `module` replaces each feed-forward."""
    kind = type("Mine", (Stranger,), {"module": f"{__name__}:{module.__name__}"})
    inner = LinearNode(in_features=4, out_features=4)
    node = kind(said=tuple((name.replace("_", "."), shape) for name, shape in said.items()), inner=inner)
    tree, plan = compose_model(build_default_run())
    return build_model(replace(tree, blocks=tuple(replace(block, feed_forward=node) for block in tree.blocks)), plan)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Gate, {"gate": (3, 4)}),
        (Beside, {"proj_weight": (3, 2), "proj_bias": (3,)}),
        (Buffers, {}),
        (Shares, {}),
    ],
)
def test_module_with_declared_parameters_is_built(module, said):
    assert any(
        "feed_forward.inner.weight" in name
        for name, _ in built(module, **said).named_parameters(remove_duplicate=False)
    )


@pytest.mark.parametrize(
    ("module", "said", "wrong"),
    [
        (Gate, {}, {"gate": (3, 4)}),
        (Gate, {"gate": (4, 3)}, {"gate": (3, 4)}),
        (Beside, {"proj_weight": (3, 2)}, {"proj.bias": (3,)}),
        (Renames, {}, {"wrapped.weight": (4, 4)}),
    ],
)
def test_module_with_undeclared_parameters_is_refused(module, said, wrong):
    with pytest.raises(UserError) as refused:
        built(module, **said)
    told = str(refused.value)
    (name,) = wrong
    assert f"parameters of blocks.0.feed_forward are not declared by its node in this shape: {name}." in told
    assert f"Mine.get_shapes() must return every parameter that is not in a child node:  {wrong}" in told
    assert "more modules" in told
