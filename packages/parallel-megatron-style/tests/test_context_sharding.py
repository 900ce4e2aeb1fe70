"""Tokens of each rank under context parallelism, and complete models over split sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gangline.batch import Batch
from gangline.config.sections import Recompute
from gangline.mesh import Mesh
from gangline.model.init import make_whole_model
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.seams import get_calls
from gangline_parallel_megatron_style.context.apply import ORDERS, set_attention
from gangline_parallel_megatron_style.context.cut import cut_batch, cut_tokens
from gangline_parallel_megatron_style.context.ring import RingAttention
from gangline_parallel_megatron_style.context.ulysses import UlyssesAttention
from gangline_testkit import rank
from gangline_testkit.pool import get_pool

B, T = 2, 16


def batch_of(documents: bool) -> Batch:
    tokens = torch.randint(0, 29, (B, T + 1), generator=torch.Generator().manual_seed(0))
    position, document = torch.arange(T).expand(B, T), None
    if documents:
        document = torch.stack([(torch.arange(T) >= 5).long(), (torch.arange(T) >= 11).long()])
        position = torch.stack([torch.arange(T) - 5 * document[0], torch.arange(T) - 11 * document[1]])
    return Batch(tokens[:, :-1], tokens[:, 1:], tokens[:, 1:] % 5 > 0, position, torch.arange(B), document, step=3)


def test_zigzag_split_pairs_front_and_back_chunks():
    tokens = torch.arange(16)[None]
    assert [cut_tokens(tokens, index, 4, "zigzag")[0].tolist() for index in range(4)] == [
        [0, 1, 14, 15],
        [2, 3, 12, 13],
        [4, 5, 10, 11],
        [6, 7, 8, 9],
    ]
    assert [cut_tokens(tokens, index, 2, "contiguous")[0].tolist() for index in range(2)] == [
        list(range(8)),
        list(range(8, 16)),
    ]


def test_split_batch_keeps_token_fields_together():
    batch = batch_of(True)
    part = cut_batch(batch, 1, 2, "zigzag")
    for name in ("tokens", "targets", "loss_mask", "position", "document"):
        assert getattr(part, name).equal(getattr(batch, name)[:, 4:12]), name
    assert part.sample.equal(batch.sample)
    assert part.step == 3
    assert cut_batch(batch_of(False), 1, 2, "zigzag").document is None
    assert cut_batch(batch, 0, 1, "zigzag") is batch
    assert cut_batch(replace(batch, valid=7), 1, 2, "zigzag").valid is None


def test_split_of_square_batch_keeps_sample_ids():
    """Check a batch of two sequences of two tokens: `sample` has one number per sequence and is not split."""
    batch = batch_of(False)
    square = replace(batch, **{name: getattr(batch, name)[:, :2] for name in ("tokens", "targets", "position")})
    assert cut_batch(square, 0, 2, "contiguous").sample.equal(batch.sample)


@pytest.mark.parametrize(("order", "tokens", "chunks"), [("zigzag", 12, 8), ("contiguous", 10, 4)])
def test_sequence_length_not_divisible_by_chunks_is_refused(order, tokens, chunks):
    with pytest.raises(ValueError, match=f"{tokens} tokens do not divide into {chunks} chunks"):
        cut_tokens(torch.zeros(1, tokens), 0, 4, order)


def model_of(method: str | None, comm=None, recompute: Recompute = Recompute.none):
    tree, plan = plan_decoder(
        DecoderConfig(vocab_size=29, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, init_std=0.1)
    )
    model = make_whole_model(tree, plan, seed=1, dtype=torch.float64)
    if method is not None:
        set_attention(model, plan, comm, method, get_calls(tree, plan, "attention"))
    finish = make_finish(recompute, False, seams=plan.seams)
    for index, block in enumerate(model.blocks):
        finish(block, f"blocks.{index}")
    return model


def trained(method: str, documents: bool, recompute: Recompute):
    """Return this rank's loss and gradients."""
    comm = rank.make_comms(Mesh.of({"cp": rank.world}), False).get_comm("cp")
    model = model_of(method, comm, recompute)
    loss = model(cut_batch(batch_of(documents), comm.index, comm.size, ORDERS[method]))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("documents", [False, True], ids=["plain", "documents"])
@pytest.mark.parametrize("recompute", Recompute, ids=lambda r: r.value)
def test_model_over_split_sequences_matches_one_process(world, method, documents, recompute):
    """Check that losses and gradients, added up over ranks, equal the loss and the gradients of one process."""
    whole = model_of(None)
    wanted = whole(batch_of(documents))
    wanted.backward()
    ranks = get_pool(world).run(trained, method, documents, recompute)
    assert sum(loss for loss, _ in ranks) == pytest.approx(wanted.item(), rel=1e-12)
    for name, parameter in whole.named_parameters():
        total = sum(gradients[name] for _, gradients in ranks)
        assert (total - parameter.grad).norm() <= 1e-12 * parameter.grad.norm(), name


def seams(method: str) -> tuple[list[str], bool]:
    model = model_of(method, rank.make_comms(Mesh.of({"cp": rank.world}), False).get_comm("cp"))
    seams = [block.attention.attention.function for block in model.blocks]
    shared = seams[0] is seams[1] if method == "ring" else seams[0].cache is seams[1].cache
    return [type(seam).__name__ for seam in seams], shared


def test_layers_share_the_batch_cache():
    assert get_pool(2).run(seams, "ring")[0] == ([RingAttention.__name__] * 2, True)
    assert get_pool(2).run(seams, "ulysses")[0] == ([UlyssesAttention.__name__] * 2, True)


def test_cp_of_one_rank_keeps_plain_attention():
    model = model_of("ring", rank.make_comms(Mesh.of({})).get_comm("cp"))
    assert model.blocks[0].attention.attention is model_of(None).blocks[0].attention.attention
