"""Text in memory, split into windows that are read in a new random order each epoch.

The order is a function of (seed, split, epoch) alone: windows sorted by the raw output of Philox (Salmon et al., SC
2011), which, unlike a library's `shuffle`, is the same under every version of numpy.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from gangline.data.base import DataSource, Split
from gangline.data.sample import Sample
from gangline.errors import UserError
from gangline_basics.data.codec import TextCodec
from gangline_basics.data.corpus import list_corpus, split
from gangline_basics.data.formats import is_lines

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.data.config import TextConfig


COUNTED = 1 << 16  # minimum number of tokens per call of bincount


class TextSource(DataSource):
    """Windows of T tokens of one long sequence.

    tokens  (N,) tokens of all files (or lines of a .jsonl) in order, each followed by the separator
    starts  (files,) index of the first token of each file

    Window w reads tokens w·T to (w+1)·T inclusive, so that in an epoch each token but the first is a target once (the
    last N-1 mod T tokens are never targets). With `documents`, a target in another file than its input does not
    contribute to the loss.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        codec: TextCodec,
        *,
        sequence_length: int,
        seed: int,
        split: str,
        documents: bool = False,
        called: str = "files",
    ) -> None:
        self.tokens, self.starts, self.codec, self.called = tokens, starts, codec, called
        self.sequence_length, self.seed, self.split, self.documents = sequence_length, seed, split, documents
        self.windows = (len(tokens) - 1) // sequence_length
        self.tokens.flags.writeable = False  # samples are views of this array
        self._order = lru_cache(maxsize=2)(self._draw_order)

    def sample(self, i: int) -> Sample:
        epoch, turn = divmod(i, self.windows)
        start = int(self._order(epoch)[turn]) * self.sequence_length
        stop = start + self.sequence_length
        sample: Sample = {"tokens": self.tokens[start : stop + 1]}
        if self.documents:
            places = np.arange(start, stop + 1)
            file = np.searchsorted(self.starts, places, side="right") - 1
            begin = np.maximum(self.starts[file], start)
            sample["document"] = (file - file[0])[:-1]
            sample["position"] = (places - begin)[:-1]
            sample["loss_mask"] = file[1:] == file[:-1]
        return sample

    def count_samples(self) -> int:
        return self.windows

    def compute_fingerprint(self) -> str:
        order = (
            self.seed,
            self.split,
            self.sequence_length,
            self.documents,
            self.codec.identity,
            str(self.tokens.dtype),
        )
        digest = blake2b(repr(order).encode(), digest_size=16)
        digest.update(self.starts.tobytes())
        digest.update(self.tokens.data)
        return digest.hexdigest()

    def describe(self) -> str:
        vocabulary = "bytes" if self.codec.identity == "bytes" else f"a vocabulary of {self.codec.vocab_size}"
        return (
            f"{len(self.starts)} {self.called}, {len(self.tokens) / 1e6:.4g} M tokens ({vocabulary}), "
            f"unigram entropy {self._entropy:.3f} nats"
        )

    def compute_unigram_entropy(self) -> float:
        """Return -Σ p log p of the tokens' frequencies, in nats: the loss of a unigram model."""
        return self._entropy

    @cached_property
    def _entropy(self) -> float:
        counts = np.zeros(int(self.tokens.max()) + 1, np.int64)
        block = max(COUNTED, 8 * len(counts))
        for start in range(0, len(self.tokens), block):  # in blocks, because bincount converts tokens to int64
            counts += np.bincount(self.tokens[start : start + block], minlength=len(counts))
        p = counts[counts > 0] / len(self.tokens)
        return float(-(p * np.log(p)).sum())

    def identify_tokenizer(self) -> str:
        return f"{self.codec.identity}, end of text {self.codec.separator}"

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.codec.decode(tokens)

    def _draw_order(self, epoch: int) -> np.ndarray:
        key = blake2b(f"{self.seed}\0{self.split}\0{epoch}".encode(), digest_size=16).digest()
        draws = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(self.windows)
        return np.argsort(draws, kind="stable")


def build(config: TextConfig, run: Run, split_name: Split) -> TextSource:
    """Read one split. Raises UserError if a file cannot be read or the text is shorter than one sequence."""
    codec = config.build_codec(run)
    pieces = split(list_corpus(config.path), config.validation_fraction, split_name)
    end = np.asarray([] if codec.separator is None else [codec.separator], codec.dtype)
    parts: list[np.ndarray] = []
    for piece in pieces:
        for document in piece.read(config.text_field, config.binary):
            parts += [codec.encode_file(document, piece.file.path), end]
    lengths = [len(text) + len(end) for text in parts[::2]]
    tokens = np.concatenate([np.empty(0, codec.dtype), *parts])
    T = run.batch.sequence_length
    if len(tokens) <= T:
        raise UserError(
            f"data.path={config.path} is too short.",
            f"The {split_name} split has {len(tokens)} tokens, and one sequence needs {T + 1} tokens.",
            "Add text, reduce batch.sequence_length, or change data.validation_fraction.",
        )
    return TextSource(
        tokens,
        np.cumsum([0, *lengths[:-1]]),
        codec,
        sequence_length=T,
        seed=run.seed,
        split=split_name,
        documents=config.document_masking,
        called="documents" if any(is_lines(piece.file.path) for piece in pieces) else "files",
    )
