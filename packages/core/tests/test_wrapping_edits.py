"""Model edits that wrap nodes, and plans that freeze weights: an adapter around linear layers without a plugin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from gangline.config.defaults import build_default_run
from gangline.config.schema import EditConfig
from gangline.errors import UserError
from gangline.model import compose
from gangline.model.buffers import iterate_listeners
from gangline.model.build import Wrapper, build_model, construct
from gangline.model.compose import compose_model
from gangline.model.init import make_whole_model
from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import Node, WrapNode, get_parameter_shapes, iterate_nodes, map_paths, replace_node
from gangline.plan import Init, Plan
from gangline.plugin import registry
from gangline.plugin.parts import Part
from gangline_basics.model.decoder_nodes import FeedForwardNode


@dataclass(frozen=True, kw_only=True)
class BesideNode(WrapNode):
    module: ClassVar[str] = f"{__name__}:Beside"
    by: float
    beside: Node


class Beside(Wrapper):
    """Wrapper with y = by · inner(x) + beside(x)."""

    def wrap(self, node):
        self.beside, self.by = construct(node.beside), node.by

    def forward(self, x):
        return self.by * super().forward(x) + self.beside(x)


@dataclass(frozen=True, kw_only=True)
class TwiceNode(WrapNode):
    module: ClassVar[str] = f"{__name__}:Twice"


class Twice(Wrapper):
    def forward(self, x):
        return 2 * super().forward(x)


@dataclass
class Adapt(EditConfig):
    wraps: ClassVar[bool] = True
    by: float = 3.0


@dataclass
class Again(Adapt):
    pass


@dataclass
class Double(EditConfig):
    wraps: ClassVar[bool] = True


@dataclass
class Narrow(EditConfig):
    """Edit that replaces the node that the other edits wrap; its group sorts after theirs by name."""


def adapt(tree, plan, options):
    path = "blocks.0.feed_forward.w_down"
    linear = next(node for at, node in iterate_nodes(tree) if at == path and isinstance(node, LinearNode))
    tree = replace_node(tree, path, BesideNode(inner=map_paths(tree)[path], by=options.by, beside=replace(linear)))
    plan = plan.extend(inits=(Init(f"{path}.beside", "constant", 0.0),), frozen=("*",), trained=(f"{path}.beside",))
    return tree, plan, [path]


def double(tree, plan, options):
    path = "blocks.0.feed_forward.w_down"
    return replace_node(tree, path, TwiceNode(inner=map_paths(tree)[path])), plan, [path]


def narrow(tree, plan, options):
    path = "blocks.0.feed_forward"
    return replace_node(tree, path, FeedForwardNode(dim=plan.facts["dim"], ffn_dim=8)), plan, [path]


def freeze(tree, plan, options):
    return tree, replace(plan, frozen=("*",)), []


EDITS = {Adapt: "adapt", Again: "adapt", Double: "double", Narrow: "narrow"}


@pytest.fixture
def composed(monkeypatch):
    """Return a function that composes a model with these edits, as if plugins offered them."""
    known = registry.installed()
    parts = {cls: Part(name="on", config=cls, build=f"{__name__}:{name}", summary="-") for cls, name in EDITS.items()}

    class Installed:
        def find_part(self, options):
            own = type(options) in parts
            return SimpleNamespace(part=parts[type(options)]) if own else known.find_part(options)

    monkeypatch.setattr(compose, "installed", Installed)

    def make(**edits):
        return compose_model(replace(build_default_run(), edits=edits))

    return make


def test_wrappers_keep_names_and_wrap_replaced_node(composed):
    tree, plan = composed(adapt=Adapt(), double=Double(), narrow=Narrow())
    path = "blocks.0.feed_forward.w_down"
    shapes = get_parameter_shapes(tree)
    assert shapes[f"{path}.weight"] == shapes[f"{path}.beside.weight"] == (192, 8)
    assert [type(node).__name__ for at, node in iterate_nodes(tree) if at == path] == [
        "TwiceNode",
        "BesideNode",
        "LinearNode",
    ]
    model = make_whole_model(tree, plan, seed=0)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
    module = model.get_submodule(path)
    assert isinstance(module, Linear)
    assert isinstance(module, Beside)
    x = torch.randn(5, 8)
    torch.testing.assert_close(module(x), 2 * 3 * torch.nn.functional.linear(x, module.weight))
    outer, _ = composed(a=Double(), b=Adapt())
    assert type(map_paths(outer)[path]).__name__ == "BesideNode"


def test_node_inside_wrapper_can_be_replaced(composed):
    tree, _ = composed(adapt=Adapt())
    path = "blocks.0.feed_forward.w_down"
    changed = replace_node(tree, f"{path}.beside", LinearNode(in_features=512, out_features=192, bias=True))
    assert get_parameter_shapes(changed)[f"{path}.beside.bias"] == (192,)
    with pytest.raises(LookupError, match="no node"):
        replace_node(tree, f"{path}.nothing", LinearNode())


def test_duplicate_names_of_added_nodes_are_refused(composed):
    with pytest.raises(UserError, match=r"the model edit again adds blocks\.0\.feed_forward\.w_down\.beside"):
        composed(adapt=Adapt(), again=Again())


def test_most_specific_pattern_decides_trained_parameters(composed):
    plan = Plan("embed", "blocks", "head", 2, frozen=("*", "blocks.1.a.weight"), trained=("blocks.*.a", "head.norm"))
    names = ("embed.weight", "blocks.0.a.weight", "blocks.1.a.weight", "head.norm.weight")
    assert {name for name in names if plan.is_frozen(name)} == {"embed.weight", "blocks.1.a.weight"}
    assert replace(plan, tied=(("head.norm.weight", "embed.weight"),)).is_frozen("head.norm.weight")
    assert plan.find_unmatched(["blocks.0.b.weight"]) == ["blocks.1.a.weight", "blocks.*.a", "head.norm"]
    tree, plan = composed(adapt=Adapt())
    trained = [name for name, parameter in build_model(tree, plan).named_parameters() if parameter.requires_grad]
    assert trained == ["blocks.0.feed_forward.w_down.beside.weight"]


def test_model_without_trained_parameters_is_refused(composed, monkeypatch):
    monkeypatch.setattr(f"{__name__}.narrow", freeze)
    with pytest.raises(UserError, match="every parameter of this model is frozen"):
        composed(narrow=Narrow())


class Moves(torch.nn.Module):
    """Module whose buffer changes after each step."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.register_buffer("bias", torch.zeros(2))

    def after_step(self, totals):
        self.bias += 1


def test_after_step_is_not_called_on_frozen_modules():
    model = torch.nn.ModuleDict({"router": Moves()})
    plan = Plan(embed="embed", blocks="blocks", head="head", layers=1)
    for frozen, told in (
        ((), ["router"]),
        (("router.inner",), ["router"]),
        (("router",), []),
        (("router.bias",), []),
    ):
        found = [path for path, _ in iterate_listeners(model, "", replace(plan, frozen=frozen))]
        assert found == told, frozen
