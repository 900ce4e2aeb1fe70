"""The data that a run has read: its data source, the samples of each step, and the documents of each sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gangline import UserError
from gangline.config import BatchSection, Run
from gangline.plugin import registry
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline.run.directory import RunDirectory
from gangline_dataloader.sources.windows import WindowSource


@dataclass(frozen=True)
class HeldDocument:
    """A sample and the documents that it holds; the last token of the sample is only a target."""

    sample: int  # number of the sample in the run
    source: str
    epoch: int  # epoch of the source, from 0
    row: int  # row of the source: index of a sequence of T tokens, or of a row of the pack plan
    first_token: int  # index in the store of the first token of the sample
    documents: list[int]  # numbers of the documents with tokens in the sample, counted from 0 in the store


def open_run_source(run_dir: str | Path) -> tuple[Run, WindowSource]:
    """Open the run in a directory and its training data.

    Raises UserError if there is no run, its data source does not number documents, or its data has changed.
    """
    directory = RunDirectory.open(run_dir)
    run = directory.run()
    source = registry.build(run.data, run, "train")
    if not isinstance(source, WindowSource):
        name = registry.installed().find_part(run.data).part.name
        raise UserError(
            f"{run_dir} has data={name}; this command supports only data=tokens, data=dali and data=mix.",
            "Other data sources do not number the documents of a sample.",
        )
    record = directory.read_provenance().get("data")
    noted = record if isinstance(record, dict) else {}
    then = noted.get("fingerprint")
    if then and not source.continues(then, noted.get("cursor", 0), noted.get("state", {})):
        raise UserError(
            f"the training data of {run_dir} has changed since the run read it.",
            f"Fingerprint of the run: {then}. Fingerprint now: {source.compute_fingerprint()} ({source.describe()}).",
        )
    return run, source


def find_first_sample(lines: Iterable[Attempt], step: int, batch: BatchSection) -> int:
    """Find the first sample of step `step`, counted from 1, on the current branch of the run.

    lines  attempts of attempts.jsonl. Samples that a rollback skipped are left out of every step. Steps before the
           rollback keep their samples, which have lower numbers than the skipped samples.
    batch  batch options of the run
    """
    lines, cursor, steps_left = list(lines), 0, step - 1
    ramped = max(batch.ramp.values(), default=0)
    while steps_left and cursor < ramped:
        cursor = attempts.find_next_cursor(lines, cursor, batch.get_size)
        cursor, steps_left = cursor + batch.get_size(cursor), steps_left - 1
    if cursor < ramped:
        return attempts.find_next_cursor(lines, cursor, batch.get_size)
    size = batch.global_size
    for first, end in sorted((line.skipped_from, line.skipped_from + line.skipped) for line in lines if line.skipped):
        whole = max(0, (first - cursor) // size)  # number of full batches before the skipped samples
        if steps_left < whole:
            break
        if cursor < end:
            cursor, steps_left = max(cursor + whole * size, end), steps_left - whole
    return cursor + steps_left * size


def locate_documents(source: WindowSource, numbers: np.ndarray) -> list[HeldDocument]:
    """Locate samples (N,): source, epoch, row and documents. Raises UserError for a sample past the end of the data."""
    if source.order.end is not None and int(numbers.max()) >= source.order.end:
        raise UserError(f"sample {numbers.max()} does not exist: the data ends after {source.order.end} samples.")
    place, rows = source.order(numbers), source.locate_samples(numbers).row
    samples = []
    for number, k, epoch, row, store_row in zip(
        numbers.tolist(), place.source.tolist(), place.epoch.tolist(), place.row.tolist(), rows.tolist(), strict=True
    ):
        store, pieces = source.stores[k], source.list_token_ranges(k, store_row)
        documents: set[int] = set()
        for start, stop in pieces:
            documents.update(store.list_documents(start, stop))
        samples.append(HeldDocument(number, source.names[k], epoch, row, pieces[0][0], sorted(documents)))
    return samples
