"""`optimizer=adamw`, `muon` and `lion`: comparison with torch or the paper, sharded state, options by name."""

from __future__ import annotations

import pytest
import torch

from gangline.config.compose import compose
from gangline.mesh import Mesh
from gangline.plan import choose_by_pattern, is_mapped
from gangline.runtime import MatrixId, ParamShard, ShardedParam
from gangline.shard import Box, Division, Layout, Registry, Shard
from gangline_basics.optimizer.adamw import AdamwOptimizer
from gangline_basics.optimizer.adamw8bit import Adamw8bitOptimizer
from gangline_basics.optimizer.config import Adamw, Adamw8bit, Lion, Muon, Soap
from gangline_basics.optimizer.lion import LionOptimizer
from gangline_basics.optimizer.muon import MuonOptimizer, orthogonalise
from gangline_basics.optimizer.pieces import get_decay
from gangline_basics.optimizer.soap import SoapOptimizer

SHAPES = {"a.weight": (64, 32), "b.weight": (3, 17), "b.bias": (17,), "stack": (3, 8, 16), "gain": (1,)}
MESH = Mesh.of({"dp_shard": 2})


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def rows_cut(shape):
    """Return a layout that shards `shape` by rows over two ranks, unevenly; a vector is one row and is replicated."""
    rows = torch.Size(shape[:-1]).numel()
    layout = Layout(tuple(shape), divisions=(Division(("dp_shard",), ((0, rows // 3 + 1, rows),), rows=True),))
    if len(shape) == 1:
        layout = Layout(tuple(shape))
    return layout


class Pieces:
    """Weights of a runtime, complete or sharded by rows over two ranks, with both ranks in this process."""

    def __init__(self, weights, cut):
        layouts = {f"model/{name}": rows_cut(x.shape) if cut else Layout(tuple(x.shape)) for name, x in weights.items()}
        self.registry = Registry.of(MESH, layouts)
        self.boxes = {name: self.registry.list_boxes(f"model/{name}") for name in weights}
        self.tensors = {
            name: [weights[name][box.slices].clone().requires_grad_() for box in boxes]
            for name, boxes in self.boxes.items()
        }

    rank = 0

    def names(self):
        return list(self.boxes)

    def find_matrix_owners(self, names):
        return {MatrixId(name, i): 0 for name in names for i in range(torch.Size(SHAPES[name][:-2]).numel())}

    def parameters(self):
        return [
            ShardedParam(
                name,
                SHAPES[name],
                tuple(self._piece(name, box, x) for box, x in zip(boxes, self.tensors[name], strict=True)),
            )
            for name, boxes in self.boxes.items()
        ]

    @staticmethod
    def _piece(name, box, tensor):
        return ParamShard(tensor, Shard(f"model/{name}", SHAPES[name], tensor.dtype, box.offset, tensor.detach(), True))

    def set_gradients(self, gradients):
        for name, boxes in self.boxes.items():
            for box, x in zip(boxes, self.tensors[name], strict=True):
                x.grad = gradients[name][box.slices].clone()

    def whole(self):
        return {name: self.whole_of(name, [x.detach() for x in pieces]) for name, pieces in self.tensors.items()}

    def whole_of(self, name, pieces):
        whole = torch.empty(SHAPES[name])
        for box, piece in zip(self.boxes[name], pieces, strict=True):
            whole[box.slices] = piece
        return whole

    def map_matrices(self, function, inputs):
        for name, pieces in inputs:
            whole = self.whole_of(name, pieces)
            matrices = whole.view(-1, *whole.shape[-2:])
            mapped = torch.stack([function(x, MatrixId(name, i)) for i, x in enumerate(matrices)]).view_as(whole)
            yield name, [mapped[box.slices] for box in self.boxes[name]]


def trained(optimizer, pieces, steps=10):
    for step in range(steps):
        pieces.set_gradients(values(100 + step))
        optimizer.step(1e-2 / (step + 1))
    return pieces.whole()


def adamw_of(pieces, deterministic=True, **settings):
    return AdamwOptimizer(Adamw(**settings), pieces, pieces.parameters(), pieces.names(), deterministic)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "foreach"])
@pytest.mark.parametrize("settings", [{}, {"decay_vectors": True}, {"weight_decay": 0.0, "betas": (0.8, 0.9)}])
def test_adamw_matches_torch(deterministic, settings):
    config = Adamw(**settings)
    pieces = Pieces(values(0), cut=False)
    found = trained(AdamwOptimizer(config, pieces, pieces.parameters(), pieces.names(), deterministic), pieces)
    weights = {name: x.requires_grad_() for name, x in values(0).items()}
    decayed = [x for x in weights.values() if x.dim() >= 2 or config.decay_vectors]
    plain = [x for x in weights.values() if x.dim() < 2 and not config.decay_vectors]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    theirs = torch.optim.AdamW(groups, betas=tuple(config.betas), eps=config.eps, fused=not deterministic)
    for step in range(10):
        for name, gradient in values(100 + step).items():
            weights[name].grad = gradient
        for group in theirs.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        theirs.step()
    for name, x in weights.items():
        assert found[name].equal(x.detach()), name


def test_deterministic_adamw_does_not_depend_on_sharding():
    whole, cut = (Pieces(values(0), cut=cut) for cut in (False, True))
    one, other = (trained(adamw_of(pieces), pieces) for pieces in (whole, cut))
    assert any(len(boxes) > 1 for boxes in cut.boxes.values())
    assert all(one[name].equal(other[name]) for name in SHAPES)


def lion_of(pieces, **settings):
    return LionOptimizer(Lion(**settings), pieces)


@pytest.mark.parametrize("settings", [{}, {"betas": (0.5, 0.8), "decay_vectors": True}])
def test_lion_matches_paper_algorithm(settings):
    """Compare with Algorithm 2 of the paper, written out line by line."""
    config = Lion(**settings)
    found = trained(lion_of(pieces := Pieces(values(0), cut=False), **settings), pieces)
    for name, weight in values(0).items():
        mean = torch.zeros_like(weight)
        decay = config.weight_decay if weight.dim() >= 2 or config.decay_vectors else 0.0
        for step in range(10):
            gradient, rate = values(100 + step)[name], 1e-2 / (step + 1)
            update = (config.betas[0] * mean + (1 - config.betas[0]) * gradient).sign()
            weight -= rate * (update + decay * weight)
            mean = config.betas[1] * mean + (1 - config.betas[1]) * gradient
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


def test_lion_applies_lr_and_decay_by_name():
    same = {"lr_multipliers": {"a": 0.25}, "weight_decay_overrides": {"a": 4.0}, "weight_decay": 0.0}
    found = trained(lion_of(pieces := Pieces(values(0), cut=False), **same), pieces)
    optimizer = lion_of(pieces := Pieces(values(0), cut=False), weight_decay=4.0)
    for step in range(10):
        pieces.set_gradients(values(100 + step))
        optimizer.step(0.25 * (1e-2 / (step + 1)))
    assert found["a.weight"].equal(pieces.whole()["a.weight"])
    assert not found["stack"].equal(pieces.whole()["stack"])


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "lion", "muon", "soap"])
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_saved_state_resumes_identically(kind, cut):
    """Restore only the shards and `state()`, into an optimizer that has not taken a step."""
    optimizer_of = OPTIMIZERS[kind]
    straight = Pieces(values(0), cut)
    first = optimizer_of(straight)
    trained(first, straight, steps=4)
    stored = {(shard.name, shard.offset): shard.local.clone() for shard in first.shards()}
    again = Pieces(straight.whole(), cut)
    second = optimizer_of(again)
    for shard in second.shards():
        shard.local.copy_(stored.pop((shard.name, shard.offset)))
    assert not stored
    second.load_state(first.state())
    one, other = trained(first, straight), trained(second, again)
    assert all(one[name].equal(other[name]) for name in SHAPES)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "lion", "muon", "soap"])
def test_state_layout_matches_registry(kind):
    pieces = Pieces(values(0), cut=True)
    optimizer = OPTIMIZERS[kind](pieces)
    held = {}
    for shard in optimizer.shards():
        assert shard.global_shape == optimizer.registry[shard.name].shape
        assert str(shard.dtype) == f"torch.{optimizer.registry[shard.name].dtype}"
        held.setdefault(shard.name, []).append(Box(shard.offset, tuple(shard.local.shape)))
    assert {name: optimizer.registry.list_boxes(name) for name in optimizer.registry} == held
    names = {name.split("/")[1] for name in held}
    assert names == STATES[kind]


def muon_of(pieces, **settings):
    named = pieces.parameters()
    matrices = [p for p in named if len(p.shape) >= 2 and p.name != "b.weight"]
    rest = [p for p in named if p not in matrices]
    names = [p.name for p in matrices], [p.name for p in rest]
    return MuonOptimizer(Muon(**settings), pieces, matrices, rest, names, True)


def soap_of(pieces, **settings):
    matrices = {name: None for name, shape in SHAPES.items() if len(shape) >= 2 and name != "b.weight"}
    return SoapOptimizer(
        Soap(**{"precondition_frequency": 2, "max_precond_dim": 40, **settings}), pieces, matrices, True
    )


def adamw8bit_of(pieces, **settings):
    return Adamw8bitOptimizer(Adamw8bit(**{"block": 8, "min_8bit_size": 100, **settings}), pieces, True)


OPTIMIZERS = {"adamw": adamw_of, "adamw8bit": adamw8bit_of, "lion": lion_of, "muon": muon_of, "soap": soap_of}
STATES = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "adamw8bit": {"exp_avg", "exp_avg_sq", "exp_avg_scales", "exp_avg_sq_scales"},
    "lion": {"exp_avg"},
    "muon": {"exp_avg", "exp_avg_sq", "momentum"},
    "soap": {"exp_avg", "exp_avg_sq", "left", "left_basis", "right", "right_basis"},
}


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_matches_torch_within_bfloat16_rounding(nesterov):
    """Compare the update, including weight decay and update size, with that of torch, which iterates in bfloat16."""
    pieces = Pieces(values(0), cut=False)
    before = pieces.whole()["a.weight"]
    found = trained(muon_of(pieces, nesterov=nesterov), pieces, steps=3)["a.weight"]
    weight = values(0)["a.weight"].requires_grad_()
    theirs = torch.optim.Muon([weight], nesterov=nesterov, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        weight.grad = values(100 + step)["a.weight"]
        theirs.param_groups[0]["lr"] = 1e-2 / (step + 1)
        theirs.step()
    moved, expected = found - before, weight.detach() - before
    assert (moved - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (24, 48)])
def test_newton_schulz_orthogonalizes_and_keeps_directions(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = orthogonalise(matrix)
    singular = torch.linalg.svdvals(made)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ made @ vh.T
    off = inner - torch.diag(inner.diagonal())
    assert off.abs().max() < 1e-10
    assert made.dtype == torch.float64


def test_muon_does_not_depend_on_sharding():
    one, other = (trained(muon_of(pieces), pieces) for pieces in (Pieces(values(0), cut) for cut in (False, True)))
    assert all(one[name].equal(other[name]) for name in SHAPES)


BY_NAME = {
    "lr_multipliers": {"a": 0.25, "b.bias": 3.0},
    "weight_decay_overrides": {"stack": 0.0, "gain": 0.5},
    "weight_decay": 0.2,
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "foreach"])
def test_options_by_name_match_torch_groups(deterministic):
    found = trained(adamw_of(pieces := Pieces(values(0), cut=False), deterministic, **BY_NAME), pieces)
    weights = {name: x.requires_grad_() for name, x in values(0).items()}
    factors = {"a.weight": 0.25, "b.bias": 3.0}
    decays = {"a.weight": 0.2, "b.weight": 0.2, "gain": 0.5}
    groups = [{"params": [x], "weight_decay": decays.get(name, 0.0), "name": name} for name, x in weights.items()]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=not deterministic)
    for step in range(10):
        for name, gradient in values(100 + step).items():
            weights[name].grad = gradient
        for group in theirs.param_groups:
            group["lr"] = 1e-2 / (step + 1) * factors.get(group["name"], 1.0)
        theirs.step()
    for name, x in weights.items():
        assert found[name].equal(x.detach()), name


@pytest.mark.parametrize("of", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_options_by_name_do_not_depend_on_sharding(of):
    cut, whole = Pieces(values(0), cut=True), Pieces(values(0), cut=False)
    one, other = (trained(of(pieces, **BY_NAME), pieces) for pieces in (whole, cut))
    assert all(one[name].equal(other[name]) for name in SHAPES)
    plain = trained(of(pieces := Pieces(values(0), cut=False)), pieces)
    assert not any(one[name].equal(plain[name]) for name in ("a.weight", "b.bias", "stack", "gain"))


def test_muon_lr_multipliers_scale_learning_rate():
    """Compare multipliers of 0.5 for all names with half the learning rate."""
    half = trained(
        muon_of(pieces := Pieces(values(0), cut=False), lr_multipliers=dict.fromkeys(["a", "b", "stack", "gain"], 0.5)),
        pieces,
    )
    pieces = Pieces(values(0), cut=False)
    optimizer = muon_of(pieces)
    for step in range(10):
        pieces.set_gradients(values(100 + step))
        optimizer.step(0.5 * (1e-2 / (step + 1)))
    assert all(half[name].equal(x) for name, x in pieces.whole().items())


def test_most_specific_pattern_wins():
    values = {"blocks": 1.0, "blocks.*.wq": 2.0, "blocks.0.wq": 3.0, "blocks.*.wq.bias": 4.0}
    assert [
        choose_by_pattern(values, name, 0.0)
        for name in (
            "embed.weight",
            "blocks.1.wk.weight",
            "blocks.1.wq.weight",
            "blocks.0.wq.weight",
            "blocks.0.wq.bias",
        )
    ] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("option", ["lr_multipliers", "weight_decay_overrides"])
def test_pattern_without_match_is_refused(option):
    (run,) = compose(["recipe=tiny", f"optimizer.{option}={{embedd: 0.5, blocks.*.norm: 0.5}}"])
    problems = run.optimizer.check(run)
    assert ["'embedd'" in problems[0].what, "mean embed?" in problems[0].why] == [True, True]
    assert "'blocks.*.norm'" in problems[1].what
    (run,) = compose(["recipe=tiny", f"optimizer.{option}={{embed: 0.5, blocks.*: 0.5}}"])
    assert not run.optimizer.check(run)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("blocks.0.attention.wq.weight", (8, 4), True),
        ("blocks.0.feed_forward.experts.w_up.weight", (3, 8, 4), True),
        ("blocks.0.feed_forward.experts.w_up.bias", (3, 8), False),
        ("blocks.0.attention_norm.weight", (8,), False),
    ],
)
def test_weight_decay_applies_to_matrices_and_stacks(name, shape, found):
    assert get_decay(ShardedParam(name, shape, ()), Adamw(weight_decay=0.1)) == (0.1 if found else 0.0)


@pytest.mark.parametrize(
    ("name", "shape", "found"),
    [
        ("wq.weight", (8, 4), True),
        ("w_up.weight", (3, 8, 4), True),
        ("w_up.bias", (3, 8), False),
        ("convolution.weight", (64, 1, 4), False),
        ("gate.weight", (1, 8), False),
        ("norm.weight", (8,), False),
    ],
)
def test_is_mapped_accepts_true_matrices_only(name, shape, found):
    """Check also a convolution (channels, 1, taps), in which each channel would be a matrix of one row."""
    assert is_mapped(name, shape) == found


@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "foreach"])
def test_adamw_step_count_is_float32(deterministic):
    """Check with default dtype bfloat16, in which 256 + 1 is 256, so the bias correction would stop at step 256."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = adamw_of(Pieces(values(0), cut=False), deterministic)
    finally:
        torch.set_default_dtype(default)
    assert {step.dtype for group in optimizer._groups for step in group._steps} == {torch.float32}
