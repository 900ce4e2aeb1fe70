"""Ring attention and Ulysses, compared with attention over complete sequences."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from gangline.comm.solo import Solo
from gangline.comm.wrap import Wrapped
from gangline.mesh import Mesh
from gangline.model.calls import AttentionCall
from gangline_basics.model.attention import PLAIN, attention, get_plain_attention
from gangline_basics.model.reference_attention import make_mask
from gangline_parallel_megatron_style.context import blocks, ring as ring_module, visibility as visibility_module
from gangline_parallel_megatron_style.context.blocks import CPU, MATH
from gangline_parallel_megatron_style.context.cut import cut_tokens
from gangline_parallel_megatron_style.context.ring import RingAttention
from gangline_parallel_megatron_style.context.ulysses import UlyssesAttention
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

B, T, E = 2, 16, 8
NAMES = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    method: str
    dtype: torch.dtype = torch.float64
    heads: int = 4
    kv_heads: int = 4
    documents: tuple[tuple[int, ...], ...] | None = None  # first token of each document, one tuple per sequence
    math: bool = False
    call: AttentionCall = PLAIN


def cp():
    return rank.make_comms(Mesh.of({"cp": rank.world}), False).get_comm("cp")


def inputs(case: Case):
    """Return (q, k, v and the gradient of the output, for complete sequences), document ids and positions."""
    generator = torch.Generator().manual_seed(3)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    tensors = [torch.randn(B, h, T, E, generator=generator, dtype=torch.float64).to(case.dtype) for h in heads]
    position, document = torch.arange(T).expand(B, T), None
    if case.documents is not None:
        document = torch.stack([(torch.arange(T)[:, None] >= torch.tensor(starts)).sum(1) for starts in case.documents])
        position = position - torch.stack([(row[:, None] == row).int().argmax(-1) for row in document])
    return tensors, document, position


def sinks_of(case: Case) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, case.heads, dtype=case.dtype)] if case.call.sinks else []


def whole(case: Case) -> list[torch.Tensor]:
    (q, k, v, dout), document, position = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = get_plain_attention(case.call)(*leaves, document, position, *sinks_of(case))
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def parts(case: Case):
    """Return (out, dq, dk and dv of this rank's tokens, in the order of NAMES) and the positions of these tokens."""
    comm = cp()
    order = "zigzag" if case.method == "ring" else "contiguous"
    tensors, document, position = inputs(case)

    def cut(x):
        return cut_tokens(x, comm.index, comm.size, order)

    q, k, v, dout = (cut(x.transpose(1, 2)).transpose(1, 2) for x in tensors)
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    document = None if document is None else cut(document)
    if case.math:
        ring_module.choose_kernel = lambda q, masked: MATH
    try:
        ring = case.method == "ring"
        here = RingAttention(comm, case.call) if ring else UlyssesAttention(comm, get_plain_attention(case.call))
        out = here(*leaves, document, cut(position), *sinks_of(case))
        out.backward(dout)
    finally:
        ring_module.choose_kernel = lambda q, masked: CPU
    return [out.detach(), *(x.grad for x in leaves)], cut(torch.arange(T)[None])[0]


def together(found) -> list[torch.Tensor]:
    tokens = torch.cat([tokens for _, tokens in found])
    assert tokens.sort().values.tolist() == list(range(T))
    return [torch.cat(x, dim=2)[:, :, tokens.argsort()] for x in zip(*(tensors for tensors, _ in found), strict=True)]


DOCUMENTS = {
    "no documents": None,
    "one document": ((0,), (0,)),
    "documents": ((0, 3, 9), (0, 7, 8)),
    "blocks that nobody sees": ((0, 8), (0, 8, 12)),
    "short documents": (tuple(range(0, T, 2)), tuple(range(T))),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_float64_matches_unsharded_attention(world, method, kv_heads, documents):
    case = Case(method, kv_heads=kv_heads, documents=DOCUMENTS[documents])
    for name, found, wanted in zip(NAMES, together(get_pool(world).run(parts, case)), whole(case), strict=True):
        assert (found - wanted).norm() <= 1e-12 * wanted.norm(), name


CALLS = {
    "a narrow window": {"window": 2},
    "a wide window and a scale": {"window": 11, "scale": 0.2},
    "both ways": {"causal": False, "scale": 0.5},
    "all that Ulysses wraps": {"window": 5, "soft_cap": 1.5, "sinks": "sinks.weight"},
}


@pytest.mark.parametrize("documents", ["no documents", "documents", "blocks that nobody sees"])
@pytest.mark.parametrize("method", ["ring", "math", "ulysses"])
def test_attention_call_options_match_unsharded_attention(method, documents):
    kinds = [AttentionCall(**call) for call in CALLS.values()]
    for call in kinds if method == "ulysses" else kinds[:3]:
        case = Case(method.replace("math", "ring"), documents=DOCUMENTS[documents], math=method == "math", call=call)
        for name, found, wanted in zip(NAMES, together(get_pool(4).run(parts, case)), whole(case), strict=True):
            assert (found - wanted).norm() <= 1e-12 * wanted.norm(), (call, name)


def test_ring_attention_refuses_soft_cap_and_sinks():
    with pytest.raises(ValueError, match="does not support a soft cap and sinks"):
        RingAttention(Solo("cp"), AttentionCall(soft_cap=1.0, sinks="sinks.weight"))


@pytest.mark.parametrize("documents", ["no documents", "documents", "short documents"])
def test_ring_math_kernel_matches_unsharded_attention(documents):
    """Check the kernel that GPUs use for masked blocks and for float32."""
    case = Case("ring", kv_heads=2, documents=DOCUMENTS[documents], math=True)
    for name, found, wanted in zip(NAMES, together(get_pool(4).run(parts, case)), whole(case), strict=True):
        assert (found - wanted).norm() <= 1e-12 * wanted.norm(), name


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("documents", ["no documents", "documents"])
def test_float32_matches_unsharded_attention(method, documents):
    case = Case(method, torch.float32, kv_heads=2, documents=DOCUMENTS[documents])
    for name, found, wanted in zip(NAMES, together(get_pool(4).run(parts, case)), whole(case), strict=True):
        assert (found - wanted).norm() <= 2e-6 * wanted.norm(), name


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("documents", ["no documents", "documents"])
def test_bfloat16_rounds_as_one_process_does(method, documents):
    """Bound the error by twice the error of one process plus one rounding.

    Each of up to four blocks rounds its own part once.
    """
    case = Case(method, torch.bfloat16, kv_heads=2, documents=DOCUMENTS[documents])
    (q, k, v, dout), document, position = inputs(case)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = attention(*leaves, document, position)
    exact.backward(dout.double())
    ours, plain = together(get_pool(4).run(parts, case)), whole(case)
    for name, found, rounded, wanted in zip(NAMES, ours, plain, [exact, *(x.grad for x in leaves)], strict=True):
        off, own = ((x.double() - wanted).norm() / wanted.norm() for x in (found, rounded))
        assert off < 2 * own + 2**-8, name


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", ["no documents", "documents"])
def test_ulysses_is_bit_identical_to_unsharded_attention(world, dtype, documents):
    """Check heads that need no repeated key heads: Ulysses then only moves numbers."""
    case = Case("ulysses", dtype, documents=DOCUMENTS[documents])
    for name, found, wanted in zip(NAMES, together(get_pool(world).run(parts, case)), whole(case), strict=True):
        assert found.equal(wanted), name


class Counting(Wrapped):
    """Communicator that counts the bytes that this rank sends, and the calls of each collective."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()

    def _count(self, name: str, nbytes: int) -> None:
        self.calls[name] += 1
        self.sent[name] += nbytes

    def _exchange(self, sends, recvs, background):
        assert background
        self._count("exchange", sum(x.nbytes for x, _ in sends))
        return super()._exchange(sends, recvs, background)

    def _all_to_all(self, x, in_splits, out_splits, background):
        self._count("all_to_all", x.nbytes * (self.size - 1) // self.size)
        return super()._all_to_all(x, in_splits, out_splits, background)

    def _all_gather(self, x, into, background):
        self._count("all_gather", x.nbytes * (self.size - 1))
        return super()._all_gather(x, into, background)


def counted(method: str, documents: bool):
    """Return the traffic of the forward passes of two layers, and of the backward pass of one layer."""
    comm = Counting(cp())
    case = Case(method, kv_heads=2, documents=DOCUMENTS["documents"] if documents else None)
    tensors, document, position = inputs(case)
    q, k, v, _ = (x[:, :, : T // comm.size].contiguous().requires_grad_() for x in tensors)
    order = "zigzag" if method == "ring" else "contiguous"
    document = None if document is None else cut_tokens(document, comm.index, comm.size, order)
    position = cut_tokens(position, comm.index, comm.size, order)
    here = RingAttention(comm) if method == "ring" else UlyssesAttention(comm, attention)
    out = here(q, k, v, document, position)
    here(q, k, v, document, position)
    forward = dict(comm.calls), dict(comm.sent)
    comm.calls.clear()
    comm.sent.clear()
    out.sum().backward()
    return forward, (dict(comm.calls), dict(comm.sent))


def test_ring_attention_traffic_matches_closed_form():
    """Compare with n - 1 transfers in a forward pass and 2n - 1 in a backward pass.

    The backward pass has n - 1 transfers of keys and values, and n of their gradients, which return to their owner.
    Document ids are gathered once for all layers.
    """
    kv, numbers = 2 * B * 2 * (T // 4) * E * 8, B * (T // 4) * 8
    for documents in (False, True):
        for (calls, sent), backward in get_pool(4).run(counted, "ring", documents):
            assert calls == {"exchange": 2 * 3} | ({"all_gather": 1} if documents else {})
            assert sent == {"exchange": 2 * 3 * kv} | ({"all_gather": 3 * numbers} if documents else {})
            assert backward == ({"exchange": 3 + 4}, {"exchange": 7 * kv})


def test_ulysses_sends_two_all_to_alls_per_pass():
    """Check one all-to-all for queries, keys and values together, and one for the output.

    A rank sends (n - 1) / n of the bytes of each. Positions and document ids are gathered once for all layers.
    """
    t = T // 2
    packed, out, numbers = (B * (4 + 2 + 2) * t * E * 8) // 2, (B * 4 * t * E * 8) // 2, B * t * 8
    for documents in (False, True):
        for (calls, sent), backward in get_pool(2).run(counted, "ulysses", documents):
            assert calls == {"all_to_all": 4, "all_gather": 1}
            assert sent == {"all_to_all": 2 * (packed + out), "all_gather": numbers * (2 if documents else 1)}
            assert backward == ({"all_to_all": 2}, {"all_to_all": packed + out})


def blocks_computed(documents, window=None) -> tuple[int, int]:
    """Return (number of blocks that this rank computes, including its own block; number of masked blocks)."""
    seen = []

    def noting(q, masked):
        seen.append(masked)
        return CPU

    case = Case("ring", documents=documents)
    tensors, document, position = inputs(case)
    comm = cp()
    q, k, v, _ = (x[:, :, : T // comm.size].contiguous() for x in tensors)
    own = (cut_tokens(x, comm.index, comm.size, "zigzag") for x in (document, position))
    before = ring_module.choose_kernel, visibility_module.choose_kernel
    ring_module.choose_kernel = visibility_module.choose_kernel = noting
    try:
        with torch.no_grad():
            RingAttention(comm, AttentionCall(window=window))(q, k, v, *own)
    finally:
        ring_module.choose_kernel, visibility_module.choose_kernel = before
    return len(seen), sum(seen)


def test_ring_attention_skips_fully_masked_blocks():
    """Check document borders after the fourth of eight chunks and after every chunk, and a window."""
    assert get_pool(4).run(blocks_computed, ((0,), (0,))) == [(4, 0)] * 4
    # every rank has one chunk in each document: a block computes one document after another, without a mask
    assert get_pool(4).run(blocks_computed, ((0, 8), (0, 8))) == [(4, 0)] * 4
    assert get_pool(4).run(blocks_computed, ((0, 2, 4, 6, 8, 10, 12, 14),) * 2) == [(1, 0)] * 4
    assert all(masked for _, masked in get_pool(4).run(blocks_computed, ((0, 8), (0, 8)), 3))  # a window needs a mask


# --- kernels of one block ---


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "some", "a row that sees nothing"])
@pytest.mark.parametrize("kernel", [CPU, MATH], ids=["CPU", "math"])
def test_block_kernel_matches_reference_attention(kernel, mask, kv_heads):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(B, h, 6, E, dtype=torch.float64, generator=generator) for h in (4, kv_heads, kv_heads, 4)
    )
    seen = None
    if mask in ("some", "a row that sees nothing"):
        document = torch.tensor([[0, 0, 1, 1, 1, 2]] * B)
        seen = make_mask(AttentionCall(), document, document)
        if mask == "a row that sees nothing":
            seen[:, :, 2] = False
    causal = mask == "causal"
    out, lse = kernel.forward(q, k, v, causal, seen, None)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = (leaves[0], *(x.repeat_interleave(4 // kv_heads, 1) for x in leaves[1:]))
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=seen, is_causal=causal)
    scores = wide[0] @ wide[1].mT / E**0.5
    hidden = torch.ones(6, 6, dtype=torch.bool).tril().logical_not() if causal else None
    hidden = ~seen if seen is not None else hidden
    whole_lse = (scores if hidden is None else scores.masked_fill(hidden, -torch.inf)).logsumexp(-1)
    torch.testing.assert_close(lse, whole_lse.detach(), rtol=1e-13, atol=1e-13)
    sees = lse.isfinite()[..., None]
    torch.testing.assert_close(out * sees, wanted.detach() * sees, rtol=1e-13, atol=1e-13)
    assert out.isfinite().all()
    (wanted * sees).backward(dout)
    gradients = kernel.backward(dout, q, k, v, out, lse.masked_fill(~lse.isfinite(), 0), causal, seen, None)
    for found, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(found, leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_block_kernel_accepts_non_contiguous_heads(masked):
    """Check channels-last inputs: the CPU kernel assumes that each row is contiguous and does not check it."""
    dense = [torch.randn(B, 4, 6, E, dtype=torch.float64) for _ in range(4)]
    q, k, v, dout = (x.to(memory_format=torch.channels_last) for x in dense)
    assert q.stride(-1) > 1
    document = torch.tensor([[0, 0, 1, 1, 1, 2]] * B)
    seen = make_mask(AttentionCall(), document, document) if masked else None
    out, lse = CPU.forward(q, k, v, not masked, seen, None)
    wanted, wanted_lse = MATH.forward(*dense[:3], not masked, seen, None)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse), rtol=1e-12, atol=1e-12)
    found = CPU.backward(dout, q, k, v, torch.empty_like(q).copy_(out), lse, not masked, seen, None)
    gradients = MATH.backward(dense[3], *dense[:3], wanted, wanted_lse, not masked, seen, None)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", [0, 3])
def test_cuda_kernel_gets_contiguous_log_sum_exp(monkeypatch, first):
    """Check all queries and a slice: the CUDA kernel does not look at the strides of the log-sum-exp."""
    given = []

    def backward(dout, q, k, v, out, lse, *rest, scale):
        given.append(lse)
        return q, k, v

    monkeypatch.setattr(blocks, "_cuda_backward", backward)
    q, lse = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8)
    rows = (slice(None), slice(None), slice(first, None))
    blocks.CUDA.backward(q[rows], q[rows], q, q, q[rows], lse[rows], False, None, None)
    assert given[0].is_contiguous()
    assert torch.equal(given[0], lse[rows])
