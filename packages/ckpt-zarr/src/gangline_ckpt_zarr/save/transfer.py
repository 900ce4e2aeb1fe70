"""Transfer of one rank's file to its target, by the rank's writer process: from staging, or from a nearer tier."""

from __future__ import annotations

import time
from collections.abc import Callable

from gangline import BadCheckpoint
from gangline_ckpt_zarr.format.checksum import compute_seal_start
from gangline_ckpt_zarr.format.chunks import ChunkRun, RankFile
from gangline_ckpt_zarr.format.spans import make_spans
from gangline_ckpt_zarr.save.staging import Staging
from gangline_ckpt_zarr.save.writer.client import WriterClient
from gangline_ckpt_zarr.save.writer.messages import Answer, StagedMemory
from gangline_ckpt_zarr.stores.base import ObjectPath

Report = Callable[[float], None]  # called with the fraction of the file that is written
_LOOK = 0.25  # seconds between two checks of the progress
GRACE = 30.0  # seconds for a process to start, or a disk to flush


def write_file(
    writer: WriterClient,
    staging: Staging,
    file: RankFile,
    write_id: str,
    target: ObjectPath | None,
    deadline: float,
    report: Report,
) -> None:
    """Write the staged file with its seals to `target`, durable on return; None: only add the seals. Raises OSError."""
    memory = StagedMemory(file.size, path=staging.path) if staging.path else StagedMemory(file.size, fd=staging.fd)
    runs = make_spans(file.runs, _make_seal_start(write_id))
    job = writer.write(memory, runs, target, deadline_seconds=deadline)
    answer = _follow(writer, job, file.size, deadline, report)
    if answer.failed is not None:
        raise OSError(answer.failed)


def copy_file(
    writer: WriterClient,
    source: ObjectPath,
    file: RankFile,
    write_id: str,
    target: ObjectPath,
    deadline: float,
    report: Report,
) -> None:
    """Copy a file from a nearer tier, with every chunk checked on the way; durable on return.

    Raises BadCheckpoint, which names array, box and file, if a chunk is bad or cannot be read; OSError if the target
    cannot be written.
    """
    job = writer.copy(
        source, target, file.size, make_spans(file.runs, _make_seal_start(write_id)), deadline_seconds=deadline
    )
    answer = _follow(writer, job, file.size, deadline, report)
    if answer.failed is None:
        return
    if answer.chunk is None:
        raise OSError(answer.failed)
    number, chunk = answer.chunk
    box = file.runs[number].chunk_box(chunk)
    raise BadCheckpoint(file.runs[number].name, box.limits, f"{source.store}/{source.path}", answer.failed)


def compute_hang_seconds(deadline: float) -> float:
    """Return the seconds without progress after which a writer process counts as hanging.

    A request may take the full deadline and fail, and the request that cleans up after it may take the deadline again.
    """
    return 2 * deadline + GRACE


def _make_seal_start(write_id: str) -> Callable[[ChunkRun], int]:
    return lambda run: compute_seal_start(write_id, run.name, run.box.offset)


def _follow(writer: WriterClient, job: int, size: int, deadline: float, report: Report) -> Answer:
    """Wait for the job's last answer and report its progress. Raises OSError after too long without progress."""
    far, since = 0, time.monotonic()
    while True:
        try:
            answer = writer.wait(job, timeout=_LOOK)
        except TimeoutError:
            for update in writer.poll():
                if update.job == job and update.progress > far:
                    far, since = update.progress, time.monotonic()
                    report(far / size)
            if time.monotonic() - since > compute_hang_seconds(deadline):
                writer.give_up()
                raise OSError(
                    f"the writer process made no progress within {compute_hang_seconds(deadline):g} s"
                ) from None
            continue
        if answer.done:
            report(1.0)
        return answer
