"""`gangline data show DIR|URL [--json]`: describe a token store; with `--sample I`, show sample I of a run as text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gangline import UserError
from gangline_dataloader.sources.of_run import locate_documents, open_run_source
from gangline_dataloader.store.files import StoreFiles, open_store_files
from gangline_dataloader.store.manifest import FILE, Manifest, name_ends_file
from gangline_dataloader.store.npy import compute_file_size, map_vector

WIDTH = 40  # characters of the longest bar of the histogram


def run(argv: Sequence[str]) -> int:
    """Print the description of a token store, or a sample of a run. Raises UserError for a run without --sample."""
    words = argparse.ArgumentParser(
        prog="gangline data show", description="Describe a token store, or print a sample of a run."
    )
    words.add_argument("folder", metavar="DIR|URL", help="token store; with --sample: run directory")
    words.add_argument(
        "--sample", type=int, metavar="I", help="print sample I of the run as text; the first sample is 0"
    )
    words.add_argument("--json", action="store_true", help="print one JSON document")
    options = words.parse_args(list(argv))
    if options.sample is not None:
        sample = describe_sample(options.folder, options.sample)
        print(json.dumps(sample) if options.json else format_sample(sample))
        return 0
    root = Path(options.folder).expanduser()
    if (root / "config.yaml").exists() and not (root / FILE).exists():
        raise UserError(
            f"{options.folder} is a run directory, not a token store.",
            "",
            f"To print a sample of the run:  gangline data show {options.folder} --sample 0",
        )
    with open_store_files(options.folder) as files:
        about = summarise_corpus(files)
    print(json.dumps(about) if options.json else format_corpus(about))
    return 0


def summarise_corpus(store: StoreFiles) -> dict[str, Any]:
    """Return the sizes of a store as JSON; `lengths` counts documents by length in tokens, in power-of-two bins."""
    manifest, apart, held_out = store.read_manifest(), store.open_held_out(), None
    if apart is not None:
        other = apart.read_manifest()
        held_out = {"tokens": other.tokens, "documents": other.documents}
    return {
        "path": store.name,
        "identity": manifest.compute_identity(),
        "tokens": manifest.tokens,
        "documents": manifest.documents,
        "shards": len(manifest.shards),
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "tokenizer": manifest.tokenizer.kind,
        "end_of_text": manifest.tokenizer.end_of_text,
        "validation": held_out,
        "sources": manifest.report.get("by_source", {}),
        "lengths": count_documents_by_length(store, manifest),
    }


def count_documents_by_length(store: StoreFiles, manifest: Manifest) -> list[dict[str, int]]:
    """Count the documents by length in tokens, in bins [2^k, 2^(k+1)); one shard is in memory at a time."""
    counts = np.zeros(33, np.int64)
    for shard, documents in enumerate(manifest.shards.documents):
        with store.get_local_file(name_ends_file(shard), compute_file_size("<u4", documents)) as path:
            ends = np.asarray(map_vector(path, "<u4", documents), np.int64)
        powers = np.frexp(np.diff(ends, prepend=0))[1] - 1  # floor(log2), exact
        counts += np.bincount(powers, minlength=33)
    some = np.flatnonzero(counts)
    return [
        {"from": 1 << power, "below": 2 << power, "documents": int(counts[power])}
        for power in range(int(some[0]), int(some[-1]) + 1)
    ]


def format_corpus(about: dict[str, Any]) -> str:
    """Format the description of a store as text, with a histogram of document lengths."""
    lines = [
        f"{about['path']}: {about['documents']} documents, {about['tokens'] / 1e6:.4g} M tokens in "
        f"{about['shards']} shards of {about['dtype']}",
        f"  tokenizer {about['tokenizer']}, vocabulary size {about['vocab_size']}, identity {about['identity']}",
        f"  end of text: {'none' if about['end_of_text'] is None else about['end_of_text']}",
    ]
    if other := about["validation"]:
        lines.append(f"  held out: {other['documents']} documents, {other['tokens'] / 1e6:.4g} M tokens")
    for name, count in about["sources"].items():
        lines.append(
            f"  {name}: {count['files']} files, {count['documents']} documents, {count['kept']} kept, "
            f"{count['tokens'] / 1e6:.4g} M tokens"
        )
        lines += [f"    {number} dropped: {why}" for why, number in count["dropped"].items()]
        lines += [f"    {number} replaced: {what}" for what, number in count.get("replaced", {}).items()]
    lines.append("  tokens per document: number of documents")
    most = max(one["documents"] for one in about["lengths"])
    for one in about["lengths"]:
        bar = "█" * -(-one["documents"] * WIDTH // most)
        lines.append(f"  {one['from']:>11} to {one['below'] - 1:<11} {one['documents']:>10} {bar}".rstrip())
    return "\n".join(lines)


def describe_sample(run_dir: str, number: int) -> dict[str, Any]:
    """Return sample `number` of a run's training data as JSON, split into documents; the last token is only a target.

    Raises UserError for a number below 0.
    """
    if number < 0:
        raise UserError(f"--sample {number}: expected 0 or more; the first sample is 0.")
    _, source = open_run_source(run_dir)
    (one,) = locate_documents(source, np.array([number]))
    tokens = source.sample(number)["tokens"].tolist()
    index, row = source.locate_sample(number)
    store, texts = source.stores[index], []
    for start, stop in source.list_token_ranges(index, row):
        cuts = [start, *store.find_document_ends(start, stop - 1).tolist(), stop]
        for first, last in pairwise(cuts):
            part, tokens = tokens[: last - first], tokens[last - first :]
            text = source.decode(part) if source.codec else " ".join(map(str, part))
            texts.append({"document": store.find_document(first), "text": text})
    return {**asdict(one), "documents": texts}


def format_sample(found: dict[str, Any]) -> str:
    """Format a sample as text, with a heading for each document."""
    head = f"sample {found['sample']}: source {found['source']}, epoch {found['epoch']}, row {found['row']}"
    lines = [f"{head}, first token {found['first_token']}"]
    for part in found["documents"]:
        number = "(unknown number)" if part["document"] is None else part["document"]
        lines += [f"--- document {number} ---", part["text"]]
    return "\n".join(lines)
