"""Documents packed into one sequence: attention, positions and gradients equal those of separate sequences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen

from gangline.batch import Batch
from gangline.config.sections import Recompute
from gangline.model.calls import AttentionCall
from gangline.model.init import make_whole_model
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model import documents
from gangline_basics.model.attention import PlainAttention
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.last_value_cache import LastValueCache
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.reference_attention import make_mask

CONFIG = DecoderConfig(vocab_size=61, dim=24, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_dim=40, qk_norm=True)


@pytest.fixture(scope="module")
def model():
    return make_whole_model(*plan_decoder(CONFIG), seed=0, dtype=torch.float64)


def alone(batch: Batch) -> list[Batch]:
    """Return each document of the batch as a separate sequence."""
    found = []
    for row in range(batch.tokens.shape[0]):
        for number in batch.document[row].unique():
            mine = batch.document[row] == number
            length = int(mine.sum())
            tokens, targets, loss_mask = (x[row][mine][None] for x in (batch.tokens, batch.targets, batch.loss_mask))
            found.append(Batch(tokens, targets, loss_mask, torch.arange(length)[None], torch.tensor([row])))
    return found


def test_packed_documents_are_separate_sequences(model, random_batch):
    batch = random_batch(3, 40, 61, documents=5)
    parts = alone(batch)
    assert len(parts) == 15
    logits = torch.cat([model.compute_logits(part)[0] for part in parts])
    torch.testing.assert_close(model.compute_logits(batch).flatten(0, 1), logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(batch), sum(model(part) for part in parts), rtol=1e-12, atol=0)


def test_packed_documents_have_gradients_of_separate_sequences(model, random_batch):
    batch = random_batch(2, 24, 61, documents=3)
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(batch), parameters)
    apart = torch.autograd.grad(sum(model(part) for part in alone(batch)), parameters)
    for packed, separate in zip(together, apart, strict=True):
        torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-13)


def test_attention_without_document_ids_crosses_document_boundaries(model, random_batch):
    batch = random_batch(2, 24, 61, documents=3)
    assert (model.compute_logits(batch) - model.compute_logits(replace(batch, document=None))).abs().max() > 1e-6


def test_single_document_matches_causal_attention(model, random_batch):
    batch = random_batch(2, 24, 61)
    masked = model.compute_logits(replace(batch, document=torch.zeros(2, 24, dtype=torch.long)))
    torch.testing.assert_close(masked, model.compute_logits(batch), rtol=1e-11, atol=1e-13)


def test_positions_are_read_from_the_batch(model, random_batch):
    batch = random_batch(1, 8, 61)
    spread = model.compute_logits(replace(batch, position=batch.position * 7))
    assert (spread - model.compute_logits(batch)).abs().max() > 1e-6


def heads(B, H, K, T, E=8, dtype=torch.float64, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(B, n, T, E, generator=draws, dtype=dtype).requires_grad_() for n in (H, K, K)]


def masked(q, k, v, document, call):
    groups = q.shape[1] // k.shape[1]
    seen = make_mask(call, document, document)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=call.scale)


def assert_as_masked(found, arguments, document, call):
    wanted = masked(*arguments, document, call)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-12)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5), dtype=wanted.dtype)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), arguments),
        torch.autograd.grad((wanted * weights).sum(), arguments),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_attention_per_document_span_matches_masked_attention(data):
    """Draw random documents, such as single tokens and complete rows, with grouped-query attention."""
    B, T, K = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 2))
    rows = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=T, max_size=T), min_size=B, max_size=B))
    document = torch.tensor(rows).cumsum(1)
    call = AttentionCall(causal=data.draw(st.booleans()), scale=data.draw(st.sampled_from([None, 0.3])))
    arguments = heads(B, 2 * K, K, T)
    found = PlainAttention(call)(*arguments, document, document)
    assert_as_masked(found, arguments, document, call)
    assert documents.takes(call, arguments[0], None)
    spans = documents.DocumentSpans.of(document)
    assert spans.bounds.tolist() == [0, *documents.find_ends(document).tolist()]
    assert sum((last - first) * (stop - start) for first, last, start, stop in spans.spans) == B * T


def test_attention_accepts_any_memory_format():
    """Check channels_last: a kernel that assumes adjacent values of a head would read values of other heads."""
    document = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 2]])
    arguments = [x.detach().to(memory_format=torch.channels_last).requires_grad_() for x in heads(2, 4, 2, 5)]
    assert all(x.stride(-1) > 1 for x in arguments)
    assert_as_masked(PlainAttention()(*arguments, document, document), arguments, document, AttentionCall())


def test_documents_stay_separate_with_head_dim_2(random_batch):
    """Check a head size at which rotary embedding returns channels_last tensors."""
    narrow = make_whole_model(*plan_decoder(replace(CONFIG, head_dim=2)), seed=0, dtype=torch.float64)
    batch = random_batch(2, 24, 61, documents=3)
    torch.testing.assert_close(narrow(batch), sum(narrow(part) for part in alone(batch)), rtol=1e-12, atol=0)


def test_varlen_kernel_matches_masked_attention():
    """Replace the GPU kernel by a CPU function, which receives concatenated rows and the bounds of the documents."""
    document = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]])
    call, arguments = AttentionCall(scale=0.4), heads(2, 4, 2, 6)

    def kernel(q, k, v, of_queries, of_keys, longest_query, longest_key, *, scale, window_size, enable_gqa=False):
        assert of_queries is of_keys
        assert of_queries.dtype == torch.int32
        assert (longest_query, longest_key, window_size, enable_gqa) == (6, 6, (-1, 0), True)
        number = torch.bucketize(torch.arange(len(q)), of_queries[1:].long(), right=True)[None]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return masked(q, k, v, number, AttentionCall(scale=scale))[0].transpose(0, 1)

    found = documents.attend_varlen(*arguments, documents.DocumentSpans.of(document), call, kernel)
    assert_as_masked(found, arguments, document, call)


def of_torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    raise AssertionError("it has neither scale nor window nor grouped heads")


def test_unsupported_varlen_kernel_falls_back_to_mask(monkeypatch):
    documents._find_kernel.cache_clear()
    assert documents._find_kernel() is varlen.varlen_attn
    documents._find_kernel.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_10)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 2, 6, 16, dtype=torch.bfloat16, device="cuda")
    document = torch.tensor([[0, 0, 1, 1, 1, 2]])
    assert documents.attend_documents(q, q, q, document, AttentionCall(), LastValueCache()) is None
    documents._find_kernel.cache_clear()


def test_recurring_document_id_is_one_document():
    document = torch.tensor([[4, 4, 9, 9, 4]])
    arguments = heads(1, 2, 2, 5)
    assert_as_masked(PlainAttention()(*arguments, document, document), arguments, document, AttentionCall())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_block_separates_documents(model, random_batch, monkeypatch, backend):
    """Trace the forward and backward graphs by default; inductor, which takes half a minute, is nightly."""
    batch = random_batch(2, 24, 61, documents=3)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    compiled = make_whole_model(*plan_decoder(CONFIG), seed=0, dtype=torch.float64)
    make_finish(Recompute.none, compile=True)(compiled.blocks[0], "blocks.0")  # one block: each takes seconds
    torch.testing.assert_close(compiled.compute_logits(batch), model.compute_logits(batch), rtol=1e-10, atol=1e-12)
    weights = [*compiled.parameters()], [*model.parameters()]
    for one, other in zip(
        *(torch.autograd.grad(m(batch), w) for m, w in zip((compiled, model), weights, strict=True)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_attention_mask_is_causal_within_document():
    document = torch.tensor([[4, 4, 9, 9, 4]])  # a recurring id is the same document
    assert make_mask(AttentionCall(), document, document)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
