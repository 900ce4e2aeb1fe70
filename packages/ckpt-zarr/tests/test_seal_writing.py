"""Checksums of chunks that the writer process writes, for data that arrives in any parts."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from gangline_ckpt_zarr.format.checksum import TRAILER, compute_seal
from gangline_ckpt_zarr.format.spans import ChunkSpan, parse_spans
from gangline_ckpt_zarr.save.writer.checksum_thread import ChecksumThread


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_chunk_seal_covers_chunk_number(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("gangline_ckpt_zarr.save.writer.checksum_thread._AT_ONCE", at_once)
    runs = [ChunkSpan(0, 64, 48, 30, seal=17), ChunkSpan(4096, 64, 56, 1, seal=99), ChunkSpan(5000, 32, 20, 7)]
    content = random.Random(0).randbytes(8192)
    memory = bytearray(content)
    checksums = ChecksumThread(memoryview(memory), parse_spans(runs))
    checksums.wait(len(memory))
    checksums.stop()
    wanted = bytearray(content)
    for run in runs:
        for number in range(run.number):
            start = run.base + number * run.stride
            checksum = crc32c(content[start : start + run.nbytes])
            behind = checksum.to_bytes(4, "little")
            if run.seal is not None:
                behind += compute_seal(run.seal, number, checksum).to_bytes(4, "little")
            wanted[start + run.nbytes : start + run.nbytes + len(behind)] = behind
    assert memory == wanted


def test_span_without_room_for_seal_is_refused() -> None:
    assert parse_spans([(0, 12, 8, 2)]) == [ChunkSpan(0, 12, 8, 2)]
    with pytest.raises(ValueError, match="overlap"):
        parse_spans([(0, 12, 8, 2, 1)])
    with pytest.raises(ValueError, match="overlap"):
        parse_spans([(0, 16, 8, 1, 1), (8 + TRAILER - 1, 16, 8, 1, 1)])
