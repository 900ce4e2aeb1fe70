"""Tensor-parallel regions, embedding lookups and losses: results, collectives, order, refused rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensor_ranks import Case, tp, whole_of

from gangline.comm.solo import Solo
from gangline.comm.wrap import Wrapped
from gangline.mesh import Mesh
from gangline.model import forward_context
from gangline.model.calls import LossCall
from gangline.model.forward_context import Collected, Frame
from gangline.model.linear import Linear
from gangline.model.linear_nodes import LinearNode
from gangline.plan import Plan, ShardRule
from gangline_basics.model import loss as loss_module
from gangline_basics.model.loss import CrossEntropy
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.sharding.arrays import ModelShapes, lay_out
from gangline_parallel_megatron_style.tensor.apply import cut_modules
from gangline_parallel_megatron_style.tensor.embedding import Lookup
from gangline_parallel_megatron_style.tensor.loss import VocabularyLoss
from gangline_parallel_megatron_style.tensor.region import Region
from gangline_parallel_megatron_style.tensor.sequence import cut_sequence, gather_sequence, make_sequence_reducer
from gangline_parallel_megatron_style.tensor.setting import Setting
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

MODES = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence"])
WIDE = torch.float64


class Noting(Plain):
    """Precision that records every matmul."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(WIDE, WIDE)
        self.events = events

    def linear(self, x, w, b=None):
        self.events.append("linear")
        return super().linear(x, w, b)

    def compute_grad_x(self, dy, w):
        self.events.append("dx")
        return super().compute_grad_x(dy, w)

    def compute_grad_w(self, dy, x):
        self.events.append("dw")
        return super().compute_grad_w(dy, x)


class NotingComm(Wrapped):
    """Communicator that records when a collective is launched, and when a rank waits for it."""

    def __init__(self, inner, events: list[str]) -> None:
        super().__init__(inner)
        self.events = events

    def _log_call(self, name, pending, background):
        self.events.append(name)
        if not background:
            return pending
        events = self.events

        class LoggedPending:
            def wait(self):
                events.append("wait")
                return pending.wait()

        return LoggedPending()

    def _all_reduce(self, x, op, background):
        return self._log_call("all_reduce", super()._all_reduce(x, op, background), background)

    def _reduce_scatter(self, x, background):
        return self._log_call("reduce_scatter", super()._reduce_scatter(x, background), background)

    def _all_gather(self, x, into, background):
        return self._log_call("all_gather", super()._all_gather(x, into, background), background)


def parameter(*shape: int, grad: bool = True) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(sum(shape) + rank.index)
    return torch.nn.Parameter(torch.randn(shape, dtype=WIDE, generator=generator), requires_grad=grad)


def events_of(sequence_parallel: bool, x_grad: bool, w_grad: bool) -> tuple[list[str], list[str]]:
    """Return the forward and the backward events of a region with two column matmuls and one row matmul."""
    events: list[str] = []
    region = Region(Setting(NotingComm(tp(), events), Noting(events), sequence_parallel), columns=2)
    x = torch.ones(1, 4, 3, dtype=WIDE).requires_grad_(x_grad)
    first, second, last = (parameter(*shape, grad=w_grad) for shape in ((5, 3), (5, 3), (3, 5)))
    y = region.multiply_rowwise(region.multiply_colwise(x, first) * region.multiply_colwise(x, second), last)
    forward, events[:] = list(events), []
    if y.requires_grad:
        y.sum().backward()
    return forward, events


def test_weight_gradients_overlap_input_gradient_collective():
    for forward, backward in get_pool(2).run(events_of, False, True, True):
        assert forward == ["linear", "linear", "linear", "all_reduce"]
        assert backward == ["dx", "dw", "dx", "dx", "all_reduce", "dw", "dw", "wait"]
    for forward, backward in get_pool(2).run(events_of, True, True, True):
        assert forward == ["all_gather", "linear", "linear", "linear", "reduce_scatter"]
        around = ["all_gather", "dx", "dx", "reduce_scatter", "wait", "dw", "dw", "wait"]
        assert backward == ["all_gather", "dx", "dw", *around]


@MODES
def test_unneeded_gradients_are_not_computed(sequence_parallel):
    for _, backward in get_pool(2).run(events_of, sequence_parallel, False, False):
        assert backward == []
    for _, backward in get_pool(2).run(events_of, sequence_parallel, True, False):
        assert "dw" not in backward
        assert backward.count("dx") == 3
    for _, backward in get_pool(2).run(events_of, sequence_parallel, False, True):
        assert backward.count("dw") == 3
        assert backward.count("dx") == 1
        assert "all_reduce" not in backward


def frozen_biases(sequence_parallel: bool) -> list[torch.Tensor]:
    """Train only biases; return (error of the column bias gradient, row bias gradient), without gradients of x."""
    region = Region(Setting(tp(), Plain(WIDE, WIDE), sequence_parallel))
    w, a = parameter(5, 3, grad=False), parameter(3, 5, grad=False)
    b, c = parameter(5), parameter(3)
    region.multiply_rowwise(region.multiply_colwise(torch.ones(1, 4, 3, dtype=WIDE), w, b), a, c).sum().backward()
    assert w.grad is None
    assert a.grad is None
    return [b.grad - (8 if sequence_parallel else 4) * a.sum(0), c.grad]


@MODES
def test_bias_gradients_are_correct_with_frozen_weights(sequence_parallel):
    for column, row in get_pool(2).run(frozen_biases, sequence_parallel):
        assert column.abs().max() < 1e-12
        assert row.tolist() == [4.0] * 3


def twice_backward(sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor]:
    region = Region(Setting(tp(), Plain(WIDE, WIDE), sequence_parallel), columns=2)
    x = torch.ones(1, 4, 3, dtype=WIDE).requires_grad_()
    first, second, last = parameter(5, 3), parameter(5, 3), parameter(3, 5)
    y = (
        region.multiply_rowwise(region.multiply_colwise(x, first) * region.multiply_colwise(x, second), last)
        .square()
        .sum()
    )
    y.backward(retain_graph=True)
    once = first.grad.clone()
    y.backward()
    return once * 2, first.grad


@MODES
def test_retained_graph_runs_backward_twice(sequence_parallel):
    for twice, found in get_pool(2).run(twice_backward, sequence_parallel):
        torch.testing.assert_close(found, twice, rtol=1e-13, atol=0)


def written_in_place() -> bool:
    """Return whether a second matmul of x uses the new values after x was changed in place."""
    region = Region(Setting(tp(), Plain(WIDE, WIDE), True), columns=2)
    x, w = torch.ones(1, 4, 3, dtype=WIDE), parameter(5, 3)
    with torch.no_grad():
        before = region.multiply_colwise(x, w)
        return (x.mul_(2), region.multiply_colwise(x, w))[1].equal(2 * before)


def test_input_changed_in_place_is_not_reused():
    assert all(get_pool(2).run(written_in_place))


def without_and_with() -> tuple[bool, bool]:
    """Return whether outputs of one x require gradients: first under no_grad, then with gradients."""
    region = Region(Setting(tp(), Plain(WIDE, WIDE), True), columns=2)
    x, w = torch.ones(1, 4, 3, dtype=WIDE).requires_grad_(), parameter(5, 3, grad=False)
    with torch.no_grad():
        silent = region.multiply_colwise(x, w)
    return silent.requires_grad, region.multiply_colwise(x, w).requires_grad


def test_no_grad_input_is_not_reused_with_gradients():
    assert get_pool(2).run(without_and_with) == [(False, True)] * 2


def summed_in_order() -> float:
    region = Region(Setting(tp(), Plain(WIDE, WIDE), False), columns=3)
    x = torch.ones(1, 1, 1, dtype=WIDE).requires_grad_()
    weights = [torch.nn.Parameter(torch.full((1, 1), value, dtype=WIDE)) for value in (1e16, -1e16, 1.0)]
    first, second, third = (region.multiply_colwise(x, w) for w in weights)
    (third + first + second).sum().backward()
    return x.grad.item()


def test_input_gradients_are_added_in_order_of_call():
    """Add 1e16, -1e16 and 1 in order of call; in another order, rounding would lose the 1."""
    assert get_pool(2).run(summed_in_order) == [2.0, 2.0]


# --- vocabulary ---


def part(rows: int, comm) -> slice:
    each = -(-rows // comm.size)
    return slice(min(rows, comm.index * each), min(rows, (comm.index + 1) * each))


def looked_up(vocabulary: int, sequence_parallel: bool):
    comm = tp()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(vocabulary, 6, generator=generator, dtype=WIDE)
    tokens = torch.randint(0, vocabulary, (3, 8), generator=generator)
    dy = torch.randn(3, 8, 6, generator=generator, dtype=WIDE)
    own = part(vocabulary, comm)
    weight = torch.nn.Parameter(whole[own].clone())
    h = Lookup(Setting(comm, Plain(WIDE, WIDE), sequence_parallel), own.start)(tokens, weight)
    wanted = whole[tokens]
    h.backward(cut_sequence(dy, comm) if sequence_parallel else dy)
    gradient = torch.zeros_like(whole).index_put_((tokens,), dy, accumulate=True)
    same = h.equal(cut_sequence(wanted, comm) if sequence_parallel else wanted)
    return same, (weight.grad - gradient[own]).abs().sum().item()


@MODES
@pytest.mark.parametrize("vocabulary", [5, 8, 11])
def test_sharded_lookup_is_exact(vocabulary, sequence_parallel):
    """Check a lookup in which one rank has the row and others add zeros; of 5 rows, the last of 4 ranks has none."""
    for same, off in get_pool(4).run(looked_up, vocabulary, sequence_parallel):
        assert same
        assert off < 1e-13


def lost(vocabulary: int, sequence_parallel: bool, chunk: int, dtype: torch.dtype, z: float = 0.0):
    comm = tp()
    loss_module.CHUNK, before = chunk, loss_module.CHUNK
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(vocabulary, 6, generator=generator, dtype=WIDE).to(dtype)
    hidden = (torch.randn(3, 8, 6, generator=generator, dtype=WIDE) * 5).to(dtype)
    targets = torch.randint(0, vocabulary, (3, 8), generator=generator)
    targets[0, 0] = -100  # a masked target may be any number
    mask = torch.rand(3, 8, generator=generator) < 0.8
    mask[0, 0] = False
    own = part(vocabulary, comm)
    w, h = torch.nn.Parameter(whole[own].clone()), hidden.clone()
    if sequence_parallel:
        h = cut_sequence(h, comm)
    h.requires_grad_()
    collected, other = Collected(), Collected()
    setting, call = Setting(comm, Plain(dtype, dtype), sequence_parallel), LossCall(z=z)
    with forward_context.frame(Frame(coefficient=3.0, collected=collected)):
        loss = VocabularyLoss(setting, own.start, call)(h, w, targets, mask)
        (loss * 3).backward()
    loss_module.CHUNK = before
    exact_w, exact_h = whole.double().requires_grad_(), hidden.double().requires_grad_()
    with forward_context.frame(Frame(coefficient=3.0, collected=other)):
        exact = CrossEntropy(call)(exact_h, exact_w, targets, mask)
        (exact * 3).backward()
    wanted_h = cut_sequence(exact_h.grad, comm) if sequence_parallel else exact_h.grad
    off = [(loss - exact).abs() / exact.abs(), (h.grad - wanted_h).norm() / exact_h.grad.norm()]
    off.append((w.grad - exact_w.grad[own]).norm() / exact_w.grad.norm())
    for key, term in other.losses.items():
        emitted = comm.all_reduce(collected.losses[key].clone()) if sequence_parallel else collected.losses[key]
        off.append((emitted - term).abs() / term)
    return loss.detach(), [x.item() for x in off]


@MODES
@pytest.mark.parametrize("chunk", [1, 7, 1 << 25])
@pytest.mark.parametrize("vocabulary", [5, 8, 11])
def test_vocabulary_parallel_loss_matches_cross_entropy(vocabulary, sequence_parallel, chunk):
    found = get_pool(4).run(lost, vocabulary, sequence_parallel, chunk, WIDE)
    found += get_pool(4).run(lost, vocabulary, sequence_parallel, chunk, WIDE, 0.2)
    for loss, off in found:
        assert loss.equal(found[0][0])
        assert max(off) < 1e-12


@MODES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=["float32", "bf16"])
def test_low_precision_loss_is_near_float64(sequence_parallel, dtype, bound):
    found = get_pool(4).run(lost, 11, sequence_parallel, 1 << 25, dtype)
    for loss, off in found:
        assert loss.dtype == torch.float32
        assert max(off) < bound


# --- sequence ---


def along_the_sequence():
    comm = tp()
    x = torch.arange(2 * 8 * 3, dtype=WIDE).view(2, 8, 3)
    own = cut_sequence(x, comm).clone().requires_grad_()
    whole = gather_sequence(own, comm)
    total = make_sequence_reducer(comm)(own.sum())
    (whole * (comm.index + 1)).sum().backward(retain_graph=True)
    gathered, own.grad = own.grad, None
    (total * (comm.index + 1)).backward()
    return whole.equal(x), total.item() == x.sum().item(), gathered.unique().tolist(), own.grad.unique().tolist()


def test_sequence_gather_and_reduce_have_correct_gradients():
    for same, total, gathered, added in get_pool(4).run(along_the_sequence):
        assert same
        assert total
        assert gathered == added == [1 + 2 + 3 + 4]


def test_token_count_not_divisible_by_tp_is_refused():
    comm = Solo("tp")
    comm.size = 3
    with pytest.raises(ValueError, match="8 tokens do not divide over the 3 ranks of tp"):
        cut_sequence(torch.zeros(1, 8), comm)


# --- plan ---


class Bound(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
        self.comms: list = []

    def bind(self, comm) -> None:
        self.comms.append(comm)


def applied(case: Case, **changes):
    """Return the model of a case and the communicator of its only rank, after `cut_modules` with a changed plan."""
    model, plan = whole_of(case)
    model.extra = changes.pop("extra", None)
    comm = Solo("tp")
    first_rows = {"embed.weight": 0, "head.weight": 0}
    cut_modules(
        model,
        replace(plan, **changes),
        comm,
        Plain(WIDE, WIDE),
        sequence_parallel=False,
        first_rows=first_rows,
        losses=changes.get("losses", {"head": LossCall()}),
    )
    return model, comm


def test_external_module_with_sharded_parameters_binds_once():
    extra = torch.nn.ModuleList([Bound(), Bound()])
    _, comm = applied(Case(), extra=extra, sharding=(ShardRule("extra.0.*", 0), ShardRule("extra.1.a", 1, "ep")))
    assert extra[0].comms == [comm]
    assert extra[1].comms == []  # its parameter on the fold is bound to the fold


def test_ep_sharded_parameter_is_also_sharded_over_tp():
    extra = torch.nn.ModuleList([Bound()])
    rules = (ShardRule("extra.0", 0, "ep"), ShardRule.replicated("extra.0.b"), ShardRule("extra.0", 1))
    _, comm = applied(Case(), extra=extra, sharding=rules)
    assert extra[0].comms == [comm]


@pytest.mark.parametrize("whole", [False, True])
def test_module_pattern_covers_modules_added_by_edits(whole):
    """Check that `cut_modules` and `lay_out` match patterns in the same way."""
    wide = Linear(LinearNode(in_features=8, out_features=4))
    wide.side = Linear(LinearNode(in_features=8, out_features=2))
    rules = (*((ShardRule.replicated("extra.0.side"),) if whole else ()), ShardRule.colwise("extra.0"))
    model, _ = applied(Case(), extra=torch.nn.ModuleList([wide]), sharding=rules)
    assert [isinstance(x.matmul.__self__, Region) for x in (wide, wide.side)] == [True, not whole]
    plan = Plan("embed", "extra", "head", 1, sharding=rules)
    names = [f"extra.{name}" for name, _ in model.extra.named_parameters()]
    shapes = dict.fromkeys(names, (4, 8))
    given = ModelShapes(shapes, {}, {name: (name,) for name in names})
    mesh = Mesh.of({"tp": 2})
    registry = lay_out(plan, mesh, given, [0, 0, 0], zero=0, sequence_parallel=True, dtype="float32").registry
    held = {name: registry.list_rank_boxes(f"model/{name}", 0)[0][0].shape[0] for name in names}
    assert held == {"extra.0.weight": 2, "extra.0.side.weight": 4 if whole else 2}


def test_matmul_without_shard_rule_stays_replicated():
    model, _ = applied(
        Case(), sharding=(ShardRule.colwise("blocks.*.attention.wq"),), master_dtype=("blocks.*.attention.wk",)
    )
    attention = model.blocks[0].attention
    assert isinstance(attention.wq.matmul.__self__, Region)
    assert isinstance(attention.wv.matmul.__self__, Plain)
    assert attention.wk.matmul(torch.ones(1, 32), attention.wk.weight).dtype == WIDE


def test_matmuls_of_one_module_share_a_region():
    model, _ = applied(Case())
    regions = {id(x.matmul.__self__) for x in (model.blocks[0].attention.wq, model.blocks[0].attention.wo)}
    assert len(regions) == 1
    assert model.blocks[0].attention.wq.matmul.__self__.columns == 3
    assert model.blocks[0].feed_forward.w_up.matmul.__self__.columns == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sharding": (ShardRule.colwise("blocks.*.attention.wq"),), "master_dtype": ("blocks.*.attention.wq",)},
            "master_dtype of the plan",
        ),
        ({"sharding": (ShardRule("embed.weight", 1),)}, "can shard only dim 0 of the weight of embed"),
        ({"sharding": (ShardRule("head.norm.weight", 0),)}, "no module around it has a method `bind"),
        ({"sharding": (ShardRule("head.weight", 0),), "seams": ()}, "no module around it has a method `bind"),
    ],
)
def test_unsupported_shard_rule_is_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        applied(Case(), **changes)
