"""Gated delta rule in chunks, compared with the recurrence token by token; documents do not share state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gangline_models.modules.delta import apply_delta_rule, normalise_length, step_delta_rule

B, T, G, H, K, V = 2, 23, 2, 4, 6, 5


def given(seed: int = 0) -> list[Tensor]:
    """Return q, k, v, the log of the decay, and beta."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = drawn(B, T, G, K), drawn(B, T, G, K), drawn(B, T, H, V)
    made = [q, k, v, -drawn(B, T, H).abs(), drawn(B, T, H).sigmoid()]
    return [x.requires_grad_() for x in made]


def token_by_token(q, k, v, log_decay, beta, document: Tensor | None) -> Tensor:
    """Compute the output with the recurrence, token by token."""
    q, k = (normalise_length(x).repeat_interleave(H // G, dim=2) for x in (q, k))
    out = []
    for row in range(B):
        state, kept = v.new_zeros(H, K, V), []
        for t in range(T):
            if document is not None and t and document[row, t] != document[row, t - 1]:
                state = torch.zeros_like(state)
            state = state * log_decay[row, t].exp()[:, None, None]
            missed = v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t])
            state = state + torch.einsum("hk,hv,h->hkv", k[row, t], missed, beta[row, t])
            kept.append(torch.einsum("hkv,hk->hv", state, q[row, t] * K**-0.5))
        out.append(torch.stack(kept))
    return torch.stack(out)


DOCUMENTS = torch.tensor([[0] * 7 + [1] * 2 + [2] * 14, [3] * 10 + [4] * 5 + [5] * 8])


@pytest.mark.parametrize("document", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
def test_chunked_delta_rule_matches_recurrence(chunk, document):
    arguments = given()
    got, want = apply_delta_rule(*arguments, document, chunk=chunk)[0], token_by_token(*arguments, document)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    grads = (torch.autograd.grad(y, arguments, weight) for y in (got, want))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_deterministic_kernels_need_no_cumsum(monkeypatch):
    """Refuse cumsum as torch does for floats on a GPU in deterministic mode; results equal those of cumsum."""
    arguments, results = given(), []
    weight = torch.randn(B, T, H, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def refuse(x, dim):
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            out = apply_delta_rule(*arguments, DOCUMENTS, chunk=8)[0]
            results.append((out, *torch.autograd.grad(out, arguments, weight)))
            monkeypatch.setattr(Tensor, "cumsum", refuse)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("first", [1, 8, 13, 21])
@pytest.mark.parametrize("document", [None, DOCUMENTS], ids=["one document", "documents"])
def test_decoding_from_chunk_state_matches_recurrence(first, document):
    arguments = [x.detach() for x in given()]
    if document is not None:  # generated tokens continue the document of the last given token
        document = torch.cat((document[:, :first], document[:, first - 1 : first].expand(-1, T - first)), dim=1)
    want = token_by_token(*arguments, document)
    begun = None if document is None else document[:, :first]
    out, state = apply_delta_rule(*(x[:, :first] for x in arguments), begun, chunk=8)
    parts = [out]
    for t in range(first, T):
        out, state = step_delta_rule(*(x[:, t : t + 1] for x in arguments), state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=1), want, rtol=1e-11, atol=1e-12)
    with pytest.raises(ValueError, match="expected one token per step of the generation, got 2"):
        step_delta_rule(*(x[:, :2] for x in arguments), state)
