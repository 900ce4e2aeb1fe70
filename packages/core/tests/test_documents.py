"""Documents packed into one sequence are what they are alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gangline.batch import Batch
from gangline.model.calls import AttentionCall
from gangline.model.config import DecoderConfig
from gangline.model.init import whole_model
from gangline.model.plan import plan_decoder
from gangline.model.scores import visible

CONFIG = DecoderConfig(vocab_size=61, dim=24, layers=3, heads=4, kv_heads=2, head_dim=8, hidden=40, qk_norm=True)


@pytest.fixture(scope="module")
def model():
    return whole_model(*plan_decoder(CONFIG), seed=0, dtype=torch.float64)


def alone(batch: Batch) -> list[Batch]:
    """Each document of the batch as a sequence of its own."""
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
    logits = torch.cat([model.logits(part)[0] for part in parts])
    torch.testing.assert_close(model.logits(batch).flatten(0, 1), logits, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(batch), sum(model(part) for part in parts), rtol=1e-12, atol=0)


def test_so_are_their_gradients(model, random_batch):
    batch = random_batch(2, 24, 61, documents=3)
    parameters = list(model.parameters())
    together = torch.autograd.grad(model(batch), parameters)
    apart = torch.autograd.grad(sum(model(part) for part in alone(batch)), parameters)
    for packed, separate in zip(together, apart, strict=True):
        torch.testing.assert_close(packed, separate, rtol=1e-10, atol=1e-13)


def test_without_documents_a_token_sees_all_before_it(model, random_batch):
    batch = random_batch(2, 24, 61, documents=3)
    assert (model.logits(batch) - model.logits(replace(batch, document=None))).abs().max() > 1e-6


def test_one_document_is_the_causal_path(model, random_batch):
    batch = random_batch(2, 24, 61)
    masked = model.logits(replace(batch, document=torch.zeros(2, 24, dtype=torch.long)))
    torch.testing.assert_close(masked, model.logits(batch), rtol=1e-11, atol=1e-13)


def test_positions_are_read_from_the_batch(model, random_batch):
    batch = random_batch(1, 8, 61)
    spread = model.logits(replace(batch, position=batch.position * 7))
    assert (spread - model.logits(batch)).abs().max() > 1e-6


def test_the_mask_is_of_the_past_in_the_same_document():
    document = torch.tensor([[4, 4, 9, 9, 4]])  # a number that comes back is still the same document
    assert visible(AttentionCall(), document, document)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
