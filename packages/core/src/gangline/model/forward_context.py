"""Functions that module code may call without knowledge of ranks, stages or recomputation.

Outside of a `frame` they have no effect: `emit_loss` returns `hidden`, `emit_metric` does nothing,
`sum_over_sequence` and `gather_heads` are the identity, `draw` is keyed by (seed 0, step 0, sample = row number),
`return_weight_gradient` computes at once and `overlap_point` does nothing.

A strategy opens a `frame` around each microbatch's forward *and* around its backward pass. Emitted values are stored by
(microbatch, path, name), so a recomputed forward pass overwrites its earlier values and each token counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gangline.draws import draw_uniforms
from gangline.model.untraced import untraced
from gangline.model.weight_grads import accumulate_grad, defer, is_deferring
from gangline.pulse.layout import NUMBER
from gangline.pulse.write import get_current as current_pulse

MetricReduce = Literal["sum", "mean", "max"]
_FORWARD, _BACKWARD = NUMBER["forward"], NUMBER["backward"]
_STEP = (NUMBER["forward_backward"], _FORWARD, _BACKWARD)


@dataclass
class Collected:
    """Losses and metrics that modules emitted during one step on this rank, by (microbatch, path, name)."""

    losses: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    metrics: dict[tuple[int, str, str], tuple[Tensor, MetricReduce]] = field(default_factory=dict)


@dataclass
class Frame:
    """Context of one microbatch, which the functions of this module read.

    sample, document, position  key of random draws, shaped like the hidden state's leading dims (B, T)
    inner                       (sample, document, position) of all tokens, if modules between tp-sharded matmuls have
                                more tokens than the hidden state (sequence parallelism)
    loss_mask                   (B, T) tokens whose target counts in the loss; None: all
    padding                     (B, T) tokens that are padding; None: no padding
    coefficient                 d(objective)/d(term): loss scale / global token count, read in the backward pass
    over_sequence               differentiable sum over the ranks that hold other tokens of the same sequences
    for_all_heads               implementation of `gather_heads`, if heads are sharded
    """

    microbatch: int = 0
    seed: int = 0
    step: int = 0
    sample: Tensor | None = None
    document: Tensor | None = None
    position: Tensor | None = None
    inner: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None
    loss_mask: Tensor | None = None
    padding: Tensor | None = None
    coefficient: float = 1.0
    collected: Collected | None = None
    over_sequence: Callable[[Tensor], Tensor] | None = None
    for_all_heads: Callable[[Tensor], Tensor] | None = None


# Globals, not context variables: on a GPU autograd runs the backward pass, and with it recomputation, in a
# thread that would not see context variables. A rank runs one step at a time.
_frame: Frame | None = None
_path: str = ""
_overlap_point: Callable[[], None] | None = None


@contextmanager
def frame(surroundings: Frame) -> Iterator[Frame]:
    """Run the block in the context of a microbatch, for emitted values, random draws and sums over the sequence.

    In a step the pulse enters the phase "forward" for the block; in a validation the phase does not change.
    """
    global _frame
    before, _frame = _frame, surroundings
    pulse = current_pulse()
    phase = pulse.number
    if phase in _STEP:
        pulse.enter(_FORWARD)
    try:
        yield surroundings
    finally:
        _frame = before
        if phase in _STEP:
            pulse.enter(phase)


@contextmanager
def backward() -> Iterator[None]:
    """Mark the block as a backward pass in the pulse, for the watchdog and for comparisons of rank times."""
    pulse = current_pulse()
    phase = pulse.enter(_BACKWARD)
    try:
        yield
    finally:
        pulse.enter(phase)


@contextmanager
def emit_under(path: str) -> Iterator[None]:
    """Emit losses and metrics in the block under `path` ("blocks.3")."""
    global _path
    before, _path = _path, path
    try:
        yield
    finally:
        _path = before


@contextmanager
def take_turns(overlap_point: Callable[[], None]) -> Iterator[None]:
    """Set the function that `overlap_point` calls in the block: other work, while a module waits for a transfer."""
    global _overlap_point
    before, _overlap_point = _overlap_point, overlap_point
    try:
        yield
    finally:
        _overlap_point = before


def swap(surroundings: tuple[Frame | None, str] = (None, "")) -> tuple[Frame | None, str]:
    """Set (frame, path) and return the former pair, for a strategy that interleaves two microbatches."""
    global _frame, _path
    former_surroundings = _frame, _path
    _frame, _path = surroundings
    return former_surroundings


class _AddTerm(torch.autograd.Function):
    """Identity of `hidden`; its backward pass returns `coefficient` as the gradient of `term`."""

    @staticmethod
    def forward(ctx, hidden: Tensor, term: Tensor, surroundings: Frame) -> Tensor:
        ctx.surroundings, ctx.like = surroundings, term
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad_hidden: Tensor):
        return grad_hidden, torch.full_like(ctx.like, ctx.surroundings.coefficient), None


@untraced  # torch.compile would treat path, microbatch and coefficient as constants, and compile each layer apart
def emit_loss(hidden: Tensor, term: Tensor, name: str = "loss") -> Tensor:
    """Add `term` to the objective and return `hidden`.

    term: 0-d, a sum over this rank's own tokens whose targets count (`loss_mask`); like the loss, it is divided by the
    step's global token count. Use the returned `hidden`: its backward pass adds the gradient of the term.
    """
    current = _frame
    if current is None:
        return hidden
    if current.collected is not None:
        current.collected.losses[(current.microbatch, _path, name)] = term.detach()
    return _AddTerm.apply(hidden, term, current)


def get_loss_mask(like: Tensor) -> Tensor:
    """Return the mask of the tokens whose target counts, (B, T) bool. like: the input of a block, (B, T, D)."""
    current = _frame
    if current is None or current.loss_mask is None:
        return torch.ones(like.shape[:2], dtype=torch.bool, device=like.device)
    return current.loss_mask


def get_padding() -> Tensor | None:
    """Return a mask of the padding tokens in a block's input, (B, T) bool; None without padding."""
    return None if _frame is None else _frame.padding


@untraced
def emit_metric(name: str, value: Tensor, reduce: MetricReduce = "sum") -> None:
    """Report a number or a vector under the block's path; `reduce` reduces it over microbatches and ranks.

    Use "sum" for sums over this rank's own tokens and "mean" for means over its own tokens: then the results do not
    depend on the layout.
    """
    current = _frame
    if current is not None and current.collected is not None:
        current.collected.metrics[(current.microbatch, _path, name)] = (value.detach(), reduce)


def sum_over_sequence(x: Tensor) -> Tensor:
    """Return the differentiable sum of `x` over the ranks that hold other tokens of the same sequences.

    x: values per token of a block's input, not of the additional tokens between tp-sharded matmuls.
    """
    current = _frame
    return x if current is None or current.over_sequence is None else current.over_sequence(x)


def gather_heads(x_BtF: Tensor) -> Tensor:
    """Gather values that every head reads and no sharded matmul computed, such as a key shared by heads: (B, T, F).

    x: values of the t tokens of a block's input; T: number of tokens that a colwise matmul reads. The backward pass
    sums the gradient over the ranks that hold the other heads.
    """
    current = _frame
    return x_BtF if current is None or current.for_all_heads is None else current.for_all_heads(x_BtF)


@untraced
def draw(like: Tensor, site: str, first_feature: int = 0) -> Tensor:
    """Return uniforms in [0, 1), float32, shaped like `like` (B, T, F).

    The key is (seed, step, sample, document, position in the document, feature, site): draws are equal under any
    sharding, stage or recomputation. first_feature: global number of the first feature, if features are sharded.
    """
    current = _frame or Frame()
    B, T, F = like.shape
    device = like.device
    sample, document, position = current.sample, current.document, current.position
    if current.inner is not None and sample is not None and sample.shape[1] != T:
        sample, document, position = current.inner
    sample = sample if sample is not None else torch.arange(B, device=device)[:, None].expand(B, T)
    position = position if position is not None else torch.arange(T, device=device).expand(B, T)
    document = document if document is not None else torch.zeros_like(position)
    feature = torch.arange(first_feature, first_feature + F, device=device)
    key = f"{_path}/{site}"
    return draw_uniforms(
        current.seed, current.step, sample[..., None], document[..., None], position[..., None], feature, key
    )


def return_weight_gradient(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """Return a weight's gradient for the backward of an autograd Function: `compute()`, or None if it is deferred.

    A zero-bubble pipeline (arXiv 2401.10241) computes weight gradients later, while its rank would wait. So the inputs
    of `compute` must not change after the backward pass. `weight` must be the parameter itself, stored in `ctx` and not
    by `save_for_backward`, because recomputation replaces saved tensors by new ones.
    """
    if not is_deferring():
        return compute()
    defer(torch.no_grad()(lambda: accumulate_grad(weight, compute())))
    return None


def overlap_point() -> None:
    """Run other work of this rank between the start of a transfer and the wait for it.

    All ranks that take part in the transfer call this function at the same point of the same microbatch.
    """
    if _overlap_point is not None:
        _overlap_point()
