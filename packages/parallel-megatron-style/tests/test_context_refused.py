"""Undeclared attention, loss and matmul functions: refused by ring attention and Ulysses, never dropped."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from tensor_ranks import Case, whole_of

from gangline.comm.solo import Solo
from gangline.config.check import check
from gangline.errors import UserError
from gangline.model.calls import AttentionCall, LossCall
from gangline_basics.model.attention import get_plain_attention
from gangline_basics.model.loss import CrossEntropy
from gangline_basics.model.seams import get_calls
from gangline_basics.parallel.prepare import set_matmuls
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.commands import main
from gangline_parallel_megatron_style.context.apply import Method, set_attention
from gangline_parallel_megatron_style.context.ring import RingAttention
from gangline_parallel_megatron_style.context.ulysses import UlyssesAttention
from gangline_parallel_megatron_style.tensor.apply import cut_modules
from gangline_testkit import as_installed
from gangline_testkit.runs import build_small_run

PLUGIN = """
from dataclasses import dataclass, fields
from typing import ClassVar

from gangline import Part, hookimpl
from gangline.model.calls import AttentionCall
from gangline_basics.model.decoder_nodes import (AttentionNode, HeadNode)
from gangline.model.tree import iterate_nodes, replace_node
from gangline.config.schema import EditConfig


@dataclass(frozen=True, kw_only=True)
class Windowed(AttentionNode):
    module: ClassVar[str] = "narrow_modules:Windowed"


@dataclass(frozen=True, kw_only=True)
class Said(Windowed):
    other: str | None = None

    def get_seams(self):
        return {"attention": AttentionCall(window=3, other=self.other)}


@dataclass(frozen=True, kw_only=True)
class Smooth(HeadNode):
    module: ClassVar[str] = "narrow_modules:Smooth"


@dataclass
class Narrow(EditConfig):
    said: bool = False
    other: str | None = None
    head: bool = False


def edit(tree, plan, options):
    cls, new = (HeadNode, Smooth) if options.head else (AttentionNode, Said if options.said else Windowed)
    found = {path: node for path, node in iterate_nodes(tree) if type(node) is cls}
    more = {"other": options.other} if new is Said else {}
    for path, node in found.items():
        tree = replace_node(tree, path, new(**more, **{item.name: getattr(node, item.name) for item in fields(node)}))
    return tree, plan, list(found)


@hookimpl
def gangline_model_edits():
    yield Part(group="narrow", name="on", config=Narrow, build="narrow:edit", summary="See three tokens")
"""
CP = ("parallel=3d", "parallel.cp=2", "parallel.tp=1", "parallel.pp=1", "parallel.dp_shard=1", "launch.processes=2")


@pytest.fixture
def narrow(tmp_path):
    (tmp_path / "narrow.py").write_text(PLUGIN)
    with as_installed("gangline-narrow", "narrow", path=tmp_path):
        yield


def refusal(*words: str) -> str:
    """Return the error with which `train` refuses these arguments before any rank starts, or an empty text."""
    try:
        check(build_small_run("model.vocab_size=256", *words))
    except UserError as error:
        return str(error)
    return ""


def test_cp_refuses_undeclared_attention_before_start(narrow):
    said = refusal("narrow=on", *CP)
    for word in (
        "parallel.cp=2",
        "blocks.0.attention",
        "the node does not declare its attention",
        "`get_seams`",
        "AttentionCall",
    ):
        assert word in said
    said = refusal("narrow=on", *CP, "parallel.context=ulysses")
    for word in (
        "parallel.cp=2",
        "Ulysses",
        "blocks.0.attention and 1 more",
        "the node does not declare its attention",
        "`get_seams`",
        "AttentionCall",
    ):
        assert word in said
    assert refusal("narrow=on", "narrow.said=true", *CP, "parallel.context=ulysses") == ""
    assert refusal("narrow=on", "narrow.said=true", *CP) == ""
    assert refusal("narrow=on", "parallel=tp", "launch.processes=2") == ""
    assert refusal("narrow=on", "parallel=pp", "launch.processes=2") == ""


def test_ring_refuses_unknown_attention_fields_before_start(narrow):
    words = ("narrow=on", "narrow.said=true", "narrow.other=softplus for exp", *CP)
    said = refusal(*words)
    for word in ("ring attention", "blocks.0.attention", "softplus for exp", "parallel.context=ulysses"):
        assert word in said
    assert refusal(*words, "parallel.context=ulysses") == ""


def test_tp_notes_undeclared_attention(narrow):
    def told(*words: str) -> str:
        run = build_small_run("model.vocab_size=256", *words, "parallel=tp", "launch.processes=2")
        return " ".join(run.parallel.list_notices(run))

    assert "blocks.0.attention and 1 more: the node does not declare" in told("narrow=on")
    assert told("narrow=on", "narrow.said=true") == told()


@pytest.mark.parametrize("option", ["model.soft_cap=2.0", "model.sinks=true"])
def test_ring_refuses_soft_cap_or_sinks(option):
    said = refusal(option, *CP)
    assert "blocks.0.attention" in said
    assert ("a soft cap" if "cap" in option else "sinks") in said
    assert refusal(option, *CP, "parallel.context=ulysses") == ""


def test_tp_refuses_undeclared_loss_over_sharded_vocabulary(narrow):
    said = refusal("narrow=on", "narrow.head=true", "parallel=tp", "launch.processes=2")
    for word in (
        "parallel.tp=2",
        "the model-tree node of head does not declare its loss",
        "ShardRule.replicated('head.weight')",
    ):
        assert word in said
    assert refusal("narrow=on", "narrow.head=true", *CP) == ""


def test_trace_refuses_soft_cap_and_sinks():
    with pytest.raises(
        UserError, match=r"--trace does not support blocks.0.attention, whose attention has a soft cap and sinks"
    ):
        main(["explain", "--trace", "model.soft_cap=2.0", "model.sinks=true", "parallel=fsdp", "launch.processes=2"])


# --- checks in a worker ---


def two(axis: str) -> Solo:
    comm = Solo(axis)
    comm.size = 2
    return comm


def model_with(function, declared: AttentionCall | None, method: Method = "ring"):
    """Set `function` as the attention of the second block, apply `method` to all attention, and return the model."""
    case = Case()
    model, plan = whole_of(case)
    found = get_calls(case.built()[0], plan, "attention")
    found["blocks.1.attention"] = declared
    model.blocks[1].attention.attention = function
    set_attention(model, plan, two("cp"), method, found)
    return model


WINDOW = AttentionCall(window=3)


@pytest.mark.parametrize(
    ("function", "declared"),
    [
        (lambda q, k, v, document, position: v, AttentionCall()),
        (get_plain_attention(WINDOW), AttentionCall()),
        (get_plain_attention(AttentionCall()), WINDOW),
        (get_plain_attention(WINDOW), None),
    ],
    ids=["a function that says nothing", "another than declared", "declared and not there", "not declared"],
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_other_than_declared_is_refused(function, declared, method):
    with pytest.raises(UserError, match=r"blocks\.1\.attention"):
        model_with(function, declared, method)


@dataclass(frozen=True, kw_only=True)
class Slopes(AttentionCall):
    """Third-party attention call with a field that this package does not know."""

    slope: float = 0.5


@pytest.mark.parametrize(
    "call", [AttentionCall(other="softplus for exp"), Slopes(window=3)], ids=["words", "a subclass"]
)
def test_unknown_attention_call_is_wrapped_by_ulysses_only(call):
    def function(q, k, v, document, position):
        return v

    function.computes = call
    assert isinstance(model_with(function, call, "ulysses").blocks[1].attention.attention.function, UlyssesAttention)
    with pytest.raises(UserError, match=r"blocks\.1\.attention"):
        model_with(function, call)
    for build in (get_plain_attention, lambda call: RingAttention(two("cp"), call)):
        with pytest.raises(ValueError, match=r"softplus for exp|Slopes"):
            build(call)


def test_ring_attention_follows_each_layer_declaration():
    model = model_with(get_plain_attention(WINDOW), WINDOW)
    rings = [block.attention.attention.function for block in model.blocks]
    assert all(isinstance(ring, RingAttention) for ring in rings)
    assert [ring.computes for ring in rings] == [AttentionCall(), WINDOW]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_module_without_attention_seam_is_refused(method):
    case = Case()
    model, plan = whole_of(case)
    del model.blocks[0].attention.attention
    with pytest.raises(UserError, match=r"blocks\.0\.attention has no function `attention`"):
        set_attention(model, plan, two("cp"), method, get_calls(case.built()[0], plan, "attention"))


PLAIN = Plain(torch.float64, torch.float64)
ROWS = {"embed.weight": 0, "head.weight": 0}


def shard(model, plan) -> None:
    """Call `cut_modules` for the only rank of tp."""
    losses = {"head": LossCall()}
    cut_modules(model, plan, Solo("tp"), PLAIN, sequence_parallel=False, first_rows=ROWS, losses=losses)


def whole(model, plan) -> None:
    set_matmuls(model, plan, PLAIN)


@pytest.mark.parametrize("prepare", [shard, whole])
def test_custom_matmul_function_is_refused(prepare):
    model, plan = whole_of(Case())
    model.blocks[0].attention.wq.matmul = torch.sum
    with pytest.raises(UserError, match=r"blocks\.0\.attention\.wq\.matmul was replaced by a custom function"):
        prepare(model, plan)


def test_tp_refuses_a_custom_embedding_lookup():
    model, plan = whole_of(Case())
    model.embed.lookup = torch.sum
    with pytest.raises(UserError, match=r"embed\.lookup was replaced by a custom function"):
        shard(model, plan)
    model, plan = whole_of(Case())
    model.embed.lookup = torch.sum
    whole(model, plan)  # `set_products` does not replace the lookup
    assert model.embed.lookup is torch.sum


@pytest.mark.parametrize("function", [torch.sum, CrossEntropy(LossCall(z=0.1))], ids=["unknown", "another"])
def test_loss_other_than_declared_is_refused(function):
    case = Case()
    model, plan = whole_of(case)
    model.head.loss = function
    with pytest.raises(
        UserError, match="head: tensor parallelism would replace the loss function by one over the sharded vocabulary"
    ):
        shard(model, replace(plan, sharding=tuple(rule for rule in plan.sharding if rule.pattern == "head.weight")))
