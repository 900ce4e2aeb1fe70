"""Ring attention with documents and windows by the flash kernel for segments, which a CPU function replaces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gangline.mesh import Mesh
from gangline.model.calls import AttentionCall
from gangline_parallel_megatron_style.context import varlen
from gangline_parallel_megatron_style.context.blocks import MATH
from gangline_parallel_megatron_style.context.cut import cut_tokens
from gangline_parallel_megatron_style.context.ring import RingAttention
from gangline_parallel_megatron_style.context.segments import BlockTokens, group_segments
from gangline_parallel_megatron_style.context.visibility import Visibility
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

B, T, H, K, C = 2, 32, 4, 2, 8
NAMES = ("out", "dq", "dk", "dv")


# --- the flash kernel of CUDA, with its arguments and its limits ---


def iterate_scores(q, k, bounds_q, bounds_k, longest_q, longest_k, causal, scale, left, right):
    """Yield (queries, keys, scores (H, n, m)) of each segment, hidden scores -inf, as FlashAttention 2 hides them."""
    assert bounds_q.dtype == bounds_k.dtype == torch.int32
    assert bounds_q.is_contiguous()
    assert bounds_k.is_contiguous()
    assert q.stride(-1) == k.stride(-1) == 1
    assert (bounds_q[-1], bounds_k[-1]) == (len(q), len(k))
    assert longest_q > 1, "the log-sum-exp of single queries has another order"
    right = 0 if causal else right
    left, right = (-1 if bound >= longest_k else bound for bound in (left, right))
    right = longest_k if left >= 0 > right else right
    left = longest_k if right >= 0 > left else left
    for i in range(len(bounds_q) - 1):
        queries, keys = slice(*bounds_q[i : i + 2].tolist()), slice(*bounds_k[i : i + 2].tolist())
        n, m = queries.stop - queries.start, keys.stop - keys.start
        assert 0 < n <= longest_q
        assert 0 < m <= longest_k
        scores = torch.einsum("nhc,mhc->hnm", q[queries], repeat(k[keys])) * (C**-0.5 if scale is None else scale)
        ahead = torch.arange(m) - torch.arange(n)[:, None] - (m - n)
        hidden = (ahead > right) & (right >= 0) | (ahead < -left) & (left >= 0)
        yield queries, keys, scores.masked_fill(hidden, -torch.inf)


def repeat(x):
    return x.repeat_interleave(H // K, dim=1)


def play_forward(
    q,
    k,
    v,
    bounds_q,
    bounds_k,
    longest_q,
    longest_k,
    dropout,
    causal,
    debug,
    *,
    scale,
    window_size_left,
    window_size_right,
):
    assert (dropout, debug) == (0.0, False)
    bounds = bounds_q, bounds_k, longest_q, longest_k
    out, lse = torch.empty_like(q), q.new_empty(H, len(q))
    for queries, keys, scores in iterate_scores(q, k, *bounds, causal, scale, window_size_left, window_size_right):
        lse[:, queries] = scores.logsumexp(-1)
        assert lse[:, queries].isfinite().all(), "a query of the segment sees no key"
        out[queries] = torch.einsum("hnm,mhc->nhc", scores.softmax(-1), repeat(v[keys]))
    return out, lse, *torch.empty(3, 0)


def play_backward(
    dout, q, k, v, out, lse, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, rng_state, unused, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    assert dropout == 0.0
    assert lse.is_contiguous()
    assert dout.dtype == out.dtype == q.dtype
    bounds = bounds_q, bounds_k, longest_q, longest_k
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    factor = C**-0.5 if scale is None else scale
    for queries, keys, scores in iterate_scores(q, k, *bounds, causal, scale, window_size_left, window_size_right):
        p = (scores - lse[:, queries, None]).exp()
        dp = torch.einsum("nhc,mhc->hnm", dout[queries], repeat(v[keys]))
        ds = p * (dp - (dout * out)[queries].sum(-1).T[..., None]) * factor
        dq[queries] = torch.einsum("hnm,mhc->nhc", ds, repeat(k[keys]))
        dk[keys] = torch.einsum("hnm,nhc->mhc", ds, q[queries]).unflatten(1, (K, -1)).sum(2)
        dv[keys] = torch.einsum("hnm,nhc->mhc", p, dout[queries]).unflatten(1, (K, -1)).sum(2)
    return dq, dk, dv


# --- both paths of ring attention on one rank ---


@dataclass(frozen=True)
class Case:
    seed: int
    call: AttentionCall
    documents: bool


def draw(case: Case):
    """Return q, k, v and the gradient of the output for complete sequences, documents and positions."""
    generator = torch.Generator().manual_seed(case.seed)
    tensors = [torch.randn(B, h, T, C, generator=generator, dtype=torch.float64) for h in (H, K, K, H)]
    position, document = torch.arange(T).expand(B, T), None
    if case.documents:
        share = [0.05, 0.2, 0.6, 1.0][case.seed % 4]  # of tokens that begin a document; 1: documents of one token
        starts = torch.rand(B, T, generator=generator) < share
        document = starts.cumsum(1)
        position = position - (starts * position).cummax(1).values
    return tensors, document, position


def attend(case: Case) -> list[torch.Tensor]:
    comm = rank.make_comms(Mesh.of({"cp": rank.world}), False).get_comm("cp")
    tensors, document, position = draw(case)

    def cut(x):
        return cut_tokens(x, comm.index, comm.size, "zigzag")

    q, k, v, dout = (cut(x.transpose(1, 2)).transpose(1, 2) for x in tensors)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = RingAttention(comm, case.call)(*leaves, None if document is None else cut(document), cut(position))
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def attend_both_ways(cases: list[Case]):
    """Return the number of kernel calls, and (results by segments, results of the CPU path) of each case."""
    wanted = [attend(case) for case in cases]
    calls = 0

    def forward(*args, **options):
        nonlocal calls
        calls += 1
        return play_forward(*args, **options)

    make_mask = Visibility.make_mask

    def refuse(self, source, block):
        assert make_mask(self, source, block) is None, "a mask of T x T"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "takes", lambda q: True)
        patch.setattr(varlen, "_forward", forward)
        patch.setattr(varlen, "_backward", play_backward)
        patch.setattr(Visibility, "make_mask", refuse)
        found = [attend(case) for case in cases]
    return calls, list(zip(found, wanted, strict=True))


CALLS = {
    "causal": {},
    "both ways": {"causal": False, "scale": 0.5},
    "window of 1": {"window": 1},
    "window of 3": {"window": 3},
    "window of 7 with a scale": {"window": 7, "scale": 0.2},
    "window of 20": {"window": 20},
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_ring_segments_match_masked_attention(world, name):
    call = AttentionCall(**CALLS[name])
    cases = [Case(seed, call, documents=True) for seed in range(8)]
    cases += [Case(8, call, documents=False)] if call.window else []
    for calls, pairs in get_pool(world).run(attend_both_ways, cases):
        assert calls > 0
        for case, (found, wanted) in zip(cases, pairs, strict=True):
            for tensor, one, other in zip(NAMES, found, wanted, strict=True):
                assert (one - other).norm() <= 1e-12 * other.norm() + 1e-13, (case, tensor)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 40])
@pytest.mark.parametrize("own", [True, False])
def test_block_of_segments_matches_masked_block(window, own, monkeypatch):
    """Draw documents, some of which recur, and positions with gaps."""
    monkeypatch.setattr(varlen, "_forward", play_forward)
    monkeypatch.setattr(varlen, "_backward", play_backward)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, dout = (torch.randn(B, h, 9, C, generator=generator, dtype=torch.float64) for h in (H, K, K, H))
        document = (torch.rand(2, B, 9, generator=generator) < 0.3).cumsum(-1) % 3
        position = (1 + (torch.rand(2, B, 9, generator=generator) < 0.2) * 3).cumsum(-1)
        position[1] += 12
        queries, keys = (
            BlockTokens(document[side].numpy(), position[side].numpy()) for side in ([1, 1] if own else [1, 0])
        )
        seen = torch.from_numpy(queries.document[:, None, :, None] == keys.document[:, None, None, :])
        if window is not None:
            ahead = torch.from_numpy(queries.position[:, None, :, None] - keys.position[:, None, None, :])
            seen = seen & (ahead < window)
        seen = seen.tril() if own else seen
        groups = group_segments(queries, keys, window, own)
        kernel = varlen.make_varlen_kernel(groups, (B, 9), (B, 9), q.device)
        out, lse = kernel.forward(q, k, v, own, None, 0.4)
        wanted, wanted_lse = MATH.forward(q, k, v, False, seen, 0.4)
        torch.testing.assert_close((out, lse), (wanted, wanted_lse), rtol=1e-12, atol=1e-13)
        total_lse = lse.logaddexp(torch.zeros_like(lse))  # of a row with keys of other blocks
        found = kernel.backward(dout, q, k, v, out, total_lse, own, None, 0.4)
        gradients = MATH.backward(dout, q, k, v, out, total_lse, False, seen, 0.4)
        torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-13)


def test_segments_fit_operators_of_torch():
    """Call torch's operators with tensors that have no values."""
    document = np.array([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]])
    position = np.array([[0, 1, 2, 0, 1, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 0]])
    groups = group_segments(BlockTokens(document, position), BlockTokens(document, position), window=3, causal=True)
    q, k, v = (torch.empty(B, h, 8, C, dtype=torch.bfloat16, device="meta") for h in (H, K, K))
    kernel = varlen.make_varlen_kernel(groups, (B, 8), (B, 8), q.device)
    out, lse = kernel.forward(q, k, v, False, None, None)
    gradients = kernel.backward(torch.empty_like(q), q, k, v, q, lse, False, None, 0.5)
    for found, shape in zip((out, lse, *gradients), (q.shape, q.shape[:3], q.shape, k.shape, v.shape), strict=True):
        assert (found.shape, found.dtype) == (shape, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "width", "taken"),
    [
        (torch.bfloat16, 128, True),
        (torch.float16, 96, True),
        (torch.float32, 128, False),
        (torch.bfloat16, 100, False),
        (torch.bfloat16, 264, False),
    ],
)
def test_segments_need_a_flash_kernel(dtype, width, taken):
    with FakeTensorMode():
        assert varlen.takes(torch.empty(1, 1, 4, width, dtype=dtype, device="cuda")) == taken
    assert not varlen.takes(torch.empty(1, 1, 4, width, dtype=dtype))
