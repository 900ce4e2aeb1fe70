"""Sequences of one token, mixture weights of 0.001 and 0.999, any rank count, the end of an epoch.

The bytes read equal those of one process.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gangline.data.reader import ReadPlace
from gangline_dataloader import commands
from gangline_dataloader.sources import build
from gangline_testkit.runs import build_small_run

SIZE = 24  # samples per step


@pytest.fixture
def stores(tmp_path, make_store) -> list[Path]:
    found = []
    for word in ("this", "that"):
        (tmp_path / word).mkdir()
        for number in range(60):
            (tmp_path / word / f"{number}.txt").write_text(f"{word} {number} " * (1 + number % 40))
        found.append(make_store(tmp_path / word, clean=(), shard_tokens=5000, validation=0))
        assert commands.main(["prepare", "--out", str(found[-1]), "--pack", "1", "--pack", "31"]) == 0
    return found


def steps(source, width: int, micro: int, cursor: int, count: int) -> list[bytes]:
    """Return all bytes of the batches of each step, in the order of the ranks."""
    readers = [source.open_reader(ReadPlace(rank, width, SIZE, micro, torch.device("cpu"))) for rank in range(width)]
    for reader in readers:
        reader.begin(cursor, 0)
    found = []
    for _ in range(count):
        batches = [batch for reader in readers for batch in reader.take()]
        masks = (b"" if one.loss_mask is None else one.loss_mask.numpy().tobytes() for one in batches)
        found.append(b"".join(one.tokens.numpy().tobytes() for one in batches) + b"".join(masks))
    for reader in readers:
        reader.close()
    return found


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("T", [1, 31])
@pytest.mark.parametrize("weights", [None, "{a: 0.001, b: 0.999}", "{a: 0.999, b: 0.001}"])
def test_any_rank_count_and_start_match_one_process(stores, weights, T, packing):
    words = ["data=tokens", f"data.path={stores[0]}"]
    if weights is not None:
        words = ["data=mix", f"data.sources={{a: {stores[0]}, b: {stores[1]}}}", f"data.weights={weights}"]
    words += [
        "model.vocab_size=256",
        f"batch.sequence_length={T}",
        f"data.packing={packing}",
        "data.document_masking=true",
    ]
    run = build_small_run(*words)

    def source():
        return getattr(build, "build_tokens" if weights is None else "build_mix")(run.data, run, "train")

    whole = steps(source(), 1, SIZE, 0, 12)
    for width, micro in ((1, 1), (2, 4), (3, 8), (4, 6), (8, 3)):
        assert steps(source(), width, micro, 0, 12) == whole
    cursor = (source().count_samples() or 5000) - 2 * SIZE + 5  # an epoch ends within the prefetched steps
    last = steps(source(), 1, SIZE, cursor, 5)
    assert steps(source(), 4, 3, cursor + 2 * SIZE, 3) == last[2:]
