"""One save under way, after the step has been let go: written, agreed on, committed, tier by tier."""

from __future__ import annotations

import secrets
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gangline.checkpoint.base import CheckpointId, Handle, SaveFailed
from gangline.shard import Registry
from gangline_ckpt_zarr.agreement import Agreement, Failed
from gangline_ckpt_zarr.format import metadata
from gangline_ckpt_zarr.format.cells import File, Files
from gangline_ckpt_zarr.format.metadata import NAME, data_path
from gangline_ckpt_zarr.staging import Staging
from gangline_ckpt_zarr.tiers import Tier
from gangline_ckpt_zarr.writing.client import WriterProcess
from gangline_ckpt_zarr.writing.job import Cells, Memory, Target

Write = Callable[[Tier, str, Callable[[float], None]], None]  # (tier, path, progress): this rank's file, durable there


@dataclass(frozen=True)
class Content:
    """What zarr.json will say, beside the write id."""

    registry: Registry
    files: Files
    document: dict[str, Any]


class Saving(Handle):
    """Followed by a thread, which does little: the writer process has the work, the job's store the words."""

    def __init__(
        self, id: CheckpointId, tiers: Sequence[Tier], content: Content, talk: Agreement, write: Write, run_dir: str
    ) -> None:
        self.id, self.blocked_seconds = id, 0.0
        self.progress = 0.0  # of this rank's bytes, all tiers together
        self.seconds: float | None = None  # from staging to the last commit
        self._tiers, self._content, self._talk, self._write, self._run_dir = tiers, content, talk, write, run_dir
        self._why: str | None = None
        self._thread = threading.Thread(target=self._follow, name=f"save {id}", daemon=True)

    def start(self, failed: str | None = None) -> None:
        """Let the save go on by itself; `failed`: why this rank could not stage."""
        if failed is not None:
            self._talk.fail(failed)
        self._thread.start()

    def poll(self) -> bool:
        if self._thread.is_alive():
            return False
        self._raise()
        return True

    def wait(self) -> None:
        self._thread.join()
        self._raise()

    def join(self) -> None:
        """Wait for its end, whatever that is."""
        self._thread.join()

    def _raise(self) -> None:
        if self._why is not None:
            raise SaveFailed(self.id, self._why)

    def _follow(self) -> None:
        write_id = ""
        try:
            if self._talk.rank == 0:
                for tier in self._tiers:
                    tier.clear()
                self._talk.say("write id", secrets.token_hex(4))
            write_id = self._talk.hear("write id")
            for number, tier in enumerate(self._tiers):
                self._save_to(tier, write_id, number)
        except Failed as failed:
            self._why = str(failed.what)
        except Exception as error:
            self._why = told(error)
            self._talk.fail(self._why)
        if self._why is not None and write_id:
            self._abandon(write_id)

    def _save_to(self, tier: Tier, write_id: str, number: int) -> None:
        def report(share: float) -> None:
            self.progress = (number + share) / len(self._tiers)

        self._write(tier, f"{self.id}/{data_path(write_id, self._talk.rank)}", report)
        self._talk.done(f"{tier.name} written")
        self._talk.all_done(f"{tier.name} written")
        if self._talk.rank == 0:
            content = self._content
            text = metadata.write(content.registry, content.files, content.document, write_id)
            tier.store.commit(f"{self.id}/{NAME}", text)
            self._talk.say(f"{tier.name} whole", True)
            self._prune(tier)
        self._talk.hear(f"{tier.name} whole")

    def _prune(self, tier: Tier) -> None:
        """What was saved is safe: that something old cannot be deleted is no reason to end a run."""
        try:
            tier.prune(self._run_dir, self.id)
        except OSError as error:
            warnings.warn(f"an old checkpoint could not be deleted: {told(error)}", stacklevel=2)

    def _abandon(self, write_id: str) -> None:
        """A full disk should not stay full: this rank's file goes. What is whole already stays."""
        for tier in self._tiers:
            try:
                if not tier.has(self.id):
                    tier.store.delete(f"{self.id}/{data_path(write_id, self._talk.rank)}")
            except OSError as error:
                warnings.warn(f"what is left of checkpoint {self.id} could not be deleted: {told(error)}", stacklevel=2)


def write_file(
    writer: WriterProcess,
    staging: Staging,
    file: File,
    target: Target,
    deadline: float,
    report: Callable[[float], None],
) -> None:
    """Have the writer process write what is staged; returns once it is durable. Raises OSError."""
    cells = [Cells(run.base, run.stride, run.nbytes, run.count) for run in file.runs]
    memory = Memory(file.size, fd=staging.fd)
    job = writer.write(memory, cells, [target], deadline_seconds=deadline)
    answer = None
    while answer is None or not answer.over:
        try:
            answer = writer.wait(job, timeout=0.25)
        except TimeoutError:
            for answer in writer.poll():
                report(answer.progress / file.size)
    if answer.failed is not None:
        raise OSError(answer.failed)
    report(1.0)


def told(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) or type(error).__name__
