"""A keyed permutation of range(n) for shuffling, computed for any index in O(1): no table, no start-up pass, no state.

A Feistel network (Luby and Rackoff, SIAM J. Comput. 17(2), 1988, section 3) permutes range(2**bits), where 2**bits is
the smallest power of two that is at least n and at least 64. A result outside range(n) is sent through the network
again until it is inside (cycle walking: Black and Rogaway, CT-RSA 2002, section 3). For n >= 32 this takes at most two
passes on average. Each half is mixed by the finaliser of SplitMix64 (Steele et al., OOPSLA 2014, figure 16), whose high
and low bits both depend on all bits of the input. A round function without that property would leave the low bits of
neighbouring indices correlated.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

ROUNDS = 6  # four rounds barely pass the tests of randomness, six pass clearly
_LEAST_BITS = 6  # two halves of three bits: a round mixes smaller halves poorly

U64 = np.uint64


def mix(x: np.ndarray) -> np.ndarray:
    """Mix the bits by the finaliser of SplitMix64, a bijection: (...) uint64 -> (...) uint64. Overwrites `x`."""
    x ^= x >> U64(30)
    x *= U64(0xBF58476D1CE4E5B9)
    x ^= x >> U64(27)
    x *= U64(0x94D049BB133111EB)
    x ^= x >> U64(31)
    return x


def derive_round_keys(*key: object) -> np.ndarray:
    """Derive the keys of the rounds, (ROUNDS,) uint64, from the `repr` of a key: a seed, a split, a name."""
    digest = blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, "<u8").astype(U64)


class KeyedPermutation:
    """A permutation of range(n) for each tweak (an epoch, a span of rows): `permutation(index, tweak)`.

    n      number of items, from 1 to 2**62; raises ValueError otherwise
    key    values that the permutation depends on, next to n and the tweak
    """

    def __init__(self, n: int, *key: object) -> None:
        if not 0 < n <= 1 << 62:
            raise ValueError(f"a permutation needs 1 to 2**62 items, not {n}")
        self.n = n
        self.keys = derive_round_keys(*key)
        bits = max(_LEAST_BITS, (n - 1).bit_length())
        self.high, self.low = bits // 2, bits - bits // 2

    def __call__(self, index: np.ndarray, tweak: np.ndarray | int = 0) -> np.ndarray:
        """Map each `index` (...) in range(n) to its permuted index (...) int64. `tweak` broadcasts against `index`."""
        index = np.asarray(index)
        x = np.atleast_1d(index).astype(U64)
        tweaks = np.asarray(tweak).astype(U64)
        salt = mix(np.broadcast_to(tweaks, x.shape) + U64(0x9E3779B97F4A7C15))
        if self.n == 1:
            return np.zeros(index.shape, np.int64)
        x = self._apply_network(x, salt)
        outside = np.flatnonzero(x >= U64(self.n))
        while outside.size:
            again = self._apply_network(x[outside], salt[outside])
            x[outside] = again
            outside = outside[again >= U64(self.n)]
        return x.astype(np.int64).reshape(index.shape)

    def _apply_network(self, x: np.ndarray, salt: np.ndarray) -> np.ndarray:
        """Apply the Feistel network once to `x` in range(2**bits). Each round swaps the sizes of the halves."""
        high, low = self.high, self.low
        left, right = x >> U64(low), x & U64((1 << low) - 1)
        for key in self.keys:
            mixed = mix((right ^ salt) + key)
            left, right = right, left ^ (mixed & U64((1 << high) - 1))
            high, low = low, high
        return (left << U64(low)) | right


class SpanPermutation:
    """A permutation of the spans of `span` rows, and of the rows inside each span; `span` None: one span of all rows.

    A reader that streams a corpus from a remote store needs only the current span and the next one. If the last span
    has fewer rows, it stays last.
    """

    def __init__(self, n: int, span: int | None, *key: object) -> None:
        self.n = n
        self.span = n if span is None else max(1, min(span, n))
        self.full = n // self.span
        self.spans = KeyedPermutation(self.full, *key, "spans")
        self.inside = KeyedPermutation(self.span, *key, "inside")
        rest = n - self.full * self.span
        self.rest = KeyedPermutation(rest, *key, "rest") if rest else None

    def __call__(self, index: np.ndarray, epoch: np.ndarray | int = 0) -> np.ndarray:
        """Return the row number of each `index` (N,) of an epoch, (N,) int64."""
        index = np.asarray(index, np.int64)
        epoch = np.broadcast_to(np.asarray(epoch, np.int64), index.shape)
        if self.full == 1 and self.rest is None:
            return self.inside(index, epoch)
        place, offset = np.divmod(index, self.span)
        out = np.empty_like(index)
        whole = place < self.full
        span = self.spans(place[whole], epoch[whole])
        # Epoch and span make the tweak, so that each epoch permutes the rows of a span differently.
        tweak = (epoch[whole].astype(U64) << U64(40)) ^ span.astype(U64)
        out[whole] = span * self.span + self.inside(offset[whole], tweak)
        if self.rest is not None and not whole.all():
            out[~whole] = self.full * self.span + self.rest(offset[~whole], epoch[~whole])
        return out
