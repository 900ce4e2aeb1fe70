"""Compare `gangline data prepare` with encode of the library tokenizers, in CPU seconds of one process.

    python benchmarks/tokenise.py [--mb 8 --vocab-size 8192 --rounds 3 --prepare-only]

Both use one byte-level BPE, trained on a part of the text (Python's standard library). The ways alternate, and the
tokens of every document must be equal. Prints medians of megatokens per CPU second, and ratios. Goals: fast at least 6
x encode; prepare with cleaning and exact deduplication at least 0.85 x the same tokenisation alone.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gangline_basics.data.codec import TokenizerCodec
from gangline_dataloader.commands import tokenizer as trainer
from gangline_dataloader.prepare.fast_bpe import FastBpe, build_fast_bpe
from gangline_dataloader.prepare.inputs import list_inputs
from gangline_dataloader.prepare.run import prepare
from gangline_dataloader.prepare.settings import Settings


def cpu() -> float:
    """Return the user and system seconds of this process, with all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=8)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prepare-only", action="store_true", help="skip encode and encode_batch_fast of tokenizers")
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    library = Path(sysconfig.get_paths()["stdlib"])
    sizes = [(path, path.stat().st_size) for path in sorted(library.rglob("*.py")) if path.stat().st_size]
    ends = itertools.accumulate(size for _, size in sizes)
    paths = [path for (path, _), end in zip(sizes, ends, strict=True) if end <= asked.mb * 1e6]
    trainer.train(
        list_inputs([str(path) for path in paths[:: max(1, len(paths) // 150)]]),
        "text",
        asked.vocab_size,
        place / "t.json",
    )
    slow = TokenizerCodec(str(place / "t.json"), None, "replace")
    quick = build_fast_bpe(slow)
    assert isinstance(quick, FastBpe)
    documents = [path.read_bytes() for path in paths]
    folder = place / "texts"
    folder.mkdir()
    for number, content in enumerate(documents):
        (folder / f"{number:05d}.py").write_bytes(content)
    texts = [content.decode(errors="replace") for content in documents]
    encode = slow.tokenizer.encode
    count = iter(range(asked.rounds))

    def whole() -> list[np.ndarray]:
        settings = Settings(tokenizer=slow.path, validation=0)
        manifest = prepare([str(folder)], place / f"{next(count)}", settings, 1, lambda *_: None)
        return [np.empty(manifest.tokens)]

    ways: dict[str, Callable[[], list[np.ndarray]]] = {
        "tokenizers' encode": lambda: [
            np.concatenate([np.asarray(encode(part, add_special_tokens=False).ids) for part in slow.pieces(text)])
            for text in texts
        ],
        "encode_batch_fast": lambda: [slow.encode_file(content, "it") for content in documents],
        "tiktoken": lambda: [quick.encode_file(content, "it") for content in documents],
        "prepare, complete": whole,
    }
    for name in list(ways)[:2] if asked.prepare_only else ():
        del ways[name]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {}
    for _ in range(asked.rounds):
        for name, way in ways.items():
            start = cpu()
            found = way()
            seconds[name].append(cpu() - start)
            tokens[name] = found
    first, *others = (tokens[name] for name in list(ways)[:-1])
    assert all(np.array_equal(mine, one) for other in others for mine, one in zip(first, other, strict=True))
    size, held = sum(map(len, documents)) / 1e6, sum(map(len, first)) / 1e6
    print(f"{len(documents)} documents, {size:.1f} MB, {held:.2f} M tokens")
    base = statistics.median(seconds[next(iter(ways))])
    for name, taken in seconds.items():
        median = statistics.median(taken)
        rate = held / median
        print(f"{name:20} {median:7.2f} CPU s  {rate:6.2f} Mtok/CPU s  {base / median:5.2f} x the first way")
    pairs = zip(seconds["tiktoken"], seconds["prepare, complete"], strict=True)
    print(f"prepare: {statistics.median(bare / whole for bare, whole in pairs):.2f} x bare tokenisation (goal 0.85)")


if __name__ == "__main__":
    main()
