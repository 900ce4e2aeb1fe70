"""Near-deduplication by MinHash signatures and locality-sensitive hashing (LSH) in bands.

A document is the set of its shingles: every five consecutive words, lower-cased, where a word is a run of letters,
digits and underscores. A shorter document is a single shingle; a document without words resembles no other document.
The similarity of two documents is the Jaccard index |A ∩ B| / |A ∪ B| of their sets (Broder, "On the resemblance and
containment of documents", 1997). For each of 128 hash functions the signature holds the minimum over the set (by rensa,
extra `[near]`). The fraction of values in which two signatures agree estimates the similarity s with a standard
deviation of sqrt(s (1 - s) / 128), 0.035 at s = 0.8.

Signatures are split into b bands of r values. Two documents are compared if they agree in all values of a band, which
has probability 1 - (1 - s^r)^b (Lee et al., arXiv 2107.06499, section 4.2 and appendix A). A document is dropped if its
signature agrees with the signature of an earlier kept document in at least the fraction `threshold` of the values. So
the first document of each cluster is kept, and no document is dropped for its similarity to a dropped document. r is
the largest power of two (at most 16) for which a pair with s = `threshold` is compared with a probability of at least
0.9, or 1:

    threshold        r    b
    under 0.188      1  128
    0.188 to 0.513   2   64
    0.513 to 0.777   4   32
    0.778 to 0.917   8   16   (0.947 at 0.8)
    above           16    8
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np

from gangline import UserError
from gangline_dataloader.order.permutation import U64, mix

PERMUTATIONS = 128
WORDS = 5  # words of a shingle
SEED = 42  # seed of the hash functions
FOUND = 0.9  # minimum probability of comparing a pair whose similarity is the threshold
_WORD = re.compile(r"\w+")
_SPACED = bytes(byte if _WORD.match(chr(byte)) else 32 for byte in range(128)).ljust(256)  # as _WORD, twice as fast
_EMPTY = np.iinfo(np.uint32).max  # all values of the signature of a document without words


def list_shingles(text: str) -> list[str]:
    """List the shingles of a text: every five consecutive words, lower-cased."""
    text = text.lower()
    words = text.encode().translate(_SPACED).decode().split() if text.isascii() else _WORD.findall(text)
    if len(words) <= WORDS:
        return [" ".join(words)] if words else []
    return list(map(" ".join, zip(*(words[place:] for place in range(WORDS)), strict=False)))


def compute_signature(text: str) -> np.ndarray:
    """Compute the MinHash signature of a text, (128,) uint32."""
    from rensa import RMinHash

    least = RMinHash(PERMUTATIONS, SEED)
    least.update(list_shingles(text))
    return np.array(least.digest(), np.uint32)


def check() -> str:
    """Return the version of rensa, which computes signatures. Raises UserError if it is not installed."""
    try:
        return version("rensa")
    except PackageNotFoundError as error:
        raise UserError("--near-duplicates needs rensa.", "", "pip install 'gangline-dataloader[near]'") from error


def choose_bands(threshold: float) -> tuple[int, int]:
    """Choose (number of bands, values in each band) for a threshold in (0, 1]."""
    for places in (16, 8, 4, 2):
        bands = PERMUTATIONS // places
        if 1 - (1 - threshold**places) ** bands >= FOUND:
            return bands, places
    return PERMUTATIONS, 1


def mark_near_unique(
    signatures: Sequence[np.ndarray], alive: Sequence[np.ndarray], threshold: float, standing: int = 0
) -> list[np.ndarray]:
    """Mark near-duplicates: for each task a mask of its documents, false if an earlier kept document is similar.

    signatures  (n, 128) uint32 for each task; they may be mapped
    alive       (n,) bool for each task: documents to compare; other documents stay marked true and drop no document
    standing    number of leading documents that are always kept
    """
    starts = np.cumsum([0, *map(len, signatures)])
    keys = np.concatenate([_compute_band_keys(one, threshold) for one in signatures])
    here = np.flatnonzero(np.concatenate([*alive]) & np.concatenate([(one != _EMPTY).any(1) for one in signatures]))
    shared_mask = _find_shared(keys[here])

    def read(numbers: Sequence[int]) -> np.ndarray:
        task = np.searchsorted(starts, numbers, side="right") - 1
        pairs = zip(task.tolist(), numbers, strict=True)
        return np.stack([signatures[one][number - starts[one]] for one, number in pairs])

    kept_mask = np.ones(int(starts[-1]), bool)
    holding: dict[int, list[int]] = {}  # band key -> kept documents with that key
    for index in np.flatnonzero(shared_mask.any(1)):
        number = int(here[index])
        own_keys = keys[number][shared_mask[index]].tolist()
        others = sorted({other for key in own_keys for other in holding.get(key, ())})
        if number >= standing and others and ((read(others) == read([number])).mean(1) >= threshold).any():
            kept_mask[number] = False
            continue
        for key in own_keys:
            holding.setdefault(key, []).append(number)
    return np.split(kept_mask, starts[1:-1])


def _compute_band_keys(signatures: np.ndarray, threshold: float) -> np.ndarray:
    """Compute the band keys of signatures, (n, 128) uint32 -> (n, bands) uint64: a hash of each band's values."""
    bands, places = choose_bands(threshold)
    cut = np.asarray(signatures).reshape(-1, bands, places)
    keys = np.broadcast_to(np.arange(bands, dtype=U64), cut.shape[:2]).copy()
    for place in range(places):
        keys = mix(keys + cut[:, :, place])
    return keys


def _find_shared(keys: np.ndarray) -> np.ndarray:
    """Find the keys that more than one document has: (n, bands) uint64 -> (n, bands) bool."""
    flat = keys.ravel()
    order = np.argsort(flat, kind="stable")
    same = flat[order][1:] == flat[order][:-1]
    shared_mask = np.zeros(len(flat), bool)
    shared_mask[order[1:]] |= same
    shared_mask[order[:-1]] |= same
    return shared_mask.reshape(keys.shape)
