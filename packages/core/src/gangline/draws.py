"""Counter-based random numbers: each number is a function of its key only, so it is equal under every layout.

Two generators: `draw_uniforms` hashes integer tensors on their device (dropout, jitter), and `fill` draws initial
weights in fixed blocks of rows, on the CPU, from Philox (Salmon et al., SC 2011) keyed by (seed, name, block).
"""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

ALONE = 1 << 20  # number of elements below which one thread draws an array
BLOCK_ROWS = 64  # number of rows in a block of weights; a block is drawn completely even if fewer rows are needed
_GOLDEN, _MIX1, _MIX2 = (
    c - (1 << 64) if c >= 1 << 63 else c for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def make_key(*parts: object) -> int:
    """Return a signed 64-bit key: a hash of the text of all parts."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int64 (torch's shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix_bits(x: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of x (Steele, Lea, Flood, OOPSLA 2014, fig. 15), on wrapping int64."""
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def draw_uniforms(seed: int, step: int, *coordinates: Tensor | str) -> Tensor:
    """Return float32 uniforms in [0, 1) of 24 random bits, in the broadcast shape of the int64 `coordinates`."""
    site = [part for part in coordinates if isinstance(part, str)]
    state: Tensor | int = make_key(seed, step, *site)
    for part in coordinates:
        if not isinstance(part, str):
            state = mix_bits(part.to(torch.int64) + state + _GOLDEN)
    assert isinstance(state, Tensor)
    return _shift(state, 40).to(torch.float32) * 2.0**-24


def fill(
    out: Tensor,
    *,
    seed: int,
    name: str,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    distribution: str,
    scale: float,
) -> None:
    """Fill `out`, the box at `offset` of the global array `name` of `shape`, with its initial values.

    Rows run along the last dim, leading dims flattened; an array of one dim is one row. A row is always drawn with its
    complete block of rows, so a shard gets the numbers of the global array without drawing all of it. Numbers are drawn
    in float32 for any dtype of `out`; a constant needs no draw. Raises ValueError for an unknown distribution.
    """
    if distribution == "constant":
        out.detach().fill_(scale)
        return
    if distribution not in ("normal", "uniform"):
        raise ValueError(f"{name}: unknown distribution {distribution!r}; choices: normal, uniform, constant")
    if out.numel() == 0:
        return
    width, lead = (shape[-1], shape[:-1]) if shape else (1, ())
    columns = slice(offset[-1], offset[-1] + out.shape[-1]) if shape else slice(0, 1)
    rows = _number_rows(offset[:-1], tuple(out.shape[:-1]), lead)
    total = math.prod(lead)
    flat = out.detach().reshape(len(rows), columns.stop - columns.start)
    blocks, starts = np.unique(rows // BLOCK_ROWS, return_index=True)

    def draw(block: int, start: int, stop: int) -> None:
        first = block * BLOCK_ROWS
        count = min(BLOCK_ROWS, total - first)
        generator = np.random.Generator(np.random.Philox(key=make_key(seed, name, block) & ((1 << 64) - 1)))
        if distribution == "normal":
            numbers = generator.standard_normal((count, width), dtype=np.float32)
        else:
            numbers = generator.random((count, width), dtype=np.float32) * 2 - 1
        numbers *= np.float32(scale)
        with torch.inference_mode(flat.is_inference()):  # inference mode is thread-local
            flat[start:stop] = torch.from_numpy(numbers[rows[start:stop] - first, columns])

    arguments = blocks.tolist(), starts.tolist(), [*starts[1:].tolist(), len(rows)]
    threads = min(torch.get_num_threads(), len(blocks))
    if threads == 1 or out.numel() < ALONE:
        for each in zip(*arguments, strict=True):
            draw(*each)
    else:
        # numpy releases the GIL while it draws. One torch thread per worker: else each worker would start more threads.
        thread_count = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                list(pool.map(draw, *arguments))
        finally:
            torch.set_num_threads(thread_count)  # new threads inherit the last value that was set
    if flat.data_ptr() != out.data_ptr():  # `flat` is a copy, because the box has no view as a matrix
        out.detach().copy_(flat.view(out.shape))


def _number_rows(offset: tuple[int, ...], local: tuple[int, ...], lead: tuple[int, ...]) -> np.ndarray:
    """Return the global numbers of a box's rows, ascending, with leading dims flattened as in the full array."""
    rows = np.zeros(1, np.int64)
    for start, length, whole in zip(offset, local, lead, strict=True):
        rows = (rows[:, None] * whole + np.arange(start, start + length)).reshape(-1)
    return rows
