"""The writer process seals what it writes as the reader expects it: cell by cell, however it takes them in parts."""

from __future__ import annotations

import random

import pytest
from crc32c import crc32c

from gangline_ckpt_zarr.format.checksum import TRAILER, trailer
from gangline_ckpt_zarr.save.writer.checksums import Checksums
from gangline_ckpt_zarr.save.writer.messages import Cells, cells


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_cells_are_numbered_in_their_box(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr("gangline_ckpt_zarr.save.writer.checksums._AT_ONCE", at_once)
    runs = [Cells(0, 64, 48, 30, seal=17), Cells(4096, 64, 56, 1, seal=99), Cells(5000, 32, 20, 7)]
    content = random.Random(0).randbytes(8192)
    memory = bytearray(content)
    checksums = Checksums(memoryview(memory), cells(runs))
    checksums.wait(len(memory))
    checksums.stop()
    wanted = bytearray(content)
    for run in runs:
        for number in range(run.number):
            start = run.base + number * run.stride
            checksum = crc32c(content[start : start + run.nbytes])
            behind = checksum.to_bytes(4, "little") if run.seal is None else trailer(run.seal, number, checksum)
            wanted[start + run.nbytes : start + run.nbytes + len(behind)] = behind
    assert memory == wanted


def test_there_must_be_room_for_the_seal() -> None:
    assert cells([(0, 12, 8, 2)]) == [Cells(0, 12, 8, 2)]
    with pytest.raises(ValueError, match="overlap"):
        cells([(0, 12, 8, 2, 1)])
    with pytest.raises(ValueError, match="overlap"):
        cells([(0, 16, 8, 1, 1), (8 + TRAILER - 1, 16, 8, 1, 1)])
