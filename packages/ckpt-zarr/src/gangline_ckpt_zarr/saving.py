"""One save under way, after the step has been let go: written, agreed on, committed, tier by tier."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gangline.checkpoint.base import CheckpointId, Handle, SaveFailed
from gangline.shard import Registry
from gangline_ckpt_zarr.agreement import Agreement, Failed
from gangline_ckpt_zarr.format import metadata
from gangline_ckpt_zarr.format.cells import File, Files
from gangline_ckpt_zarr.format.metadata import NAME, data_path
from gangline_ckpt_zarr.format.seal import seal_start
from gangline_ckpt_zarr.staging import Staging
from gangline_ckpt_zarr.tiers import Tier
from gangline_ckpt_zarr.writing.client import WriterProcess
from gangline_ckpt_zarr.writing.job import Cells, Memory, Target

Write = Callable[[Tier, str, Callable[[float], None]], None]  # (tier, write id, progress): puts this rank's file there


@dataclass(frozen=True)
class Content:
    """What zarr.json will say, beside the write id."""

    registry: Registry
    files: Files
    document: dict[str, Any]


class Owner(Protocol):
    """What a save asks of its checkpointer."""

    tiers: Sequence[Tier]

    @property
    def run_dir(self) -> str: ...

    def note(self, text: str) -> None: ...


class Saving(Handle):
    """Followed by a thread, which does little: the writer process has the work, the job's store the words.

    Which tiers it goes to is what rank 0 wants.
    """

    def __init__(
        self, owner: Owner, id: CheckpointId, wanted: Sequence[Tier], content: Content, talk: Agreement, write: Write
    ) -> None:
        self.id, self.blocked_seconds = id, 0.0
        self.progress = 0.0  # of this rank's bytes, all tiers together
        self._owner, self._wanted, self._content, self._talk, self._write = owner, wanted, content, talk, write
        self._tiers: Sequence[Tier] = ()
        self._why: str | None = None
        self._thread = threading.Thread(target=self._follow, name=f"save {id}", daemon=True)

    def start(self, failed: str | None = None) -> None:
        """Let the save go on by itself; `failed`: why this rank could not stage."""
        if failed is not None:
            self._talk.fail(failed)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def poll(self) -> bool:
        if self.over:
            self._raise()
        return self.over

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
                for tier in self._wanted:
                    if tier.has(self.id):
                        place = f"{tier.store.url}/{self.id}"
                        raise FileExistsError(f"{place} is there already, and a checkpoint is never overwritten")
                    tier.clear()
                self._talk.say("plan", [secrets.token_hex(4), [tier.name for tier in self._wanted]])
            write_id, wanted = self._talk.hear("plan")
            self._tiers = [tier for tier in self._owner.tiers if tier.name in wanted]
            for number, tier in enumerate(self._tiers):
                self._save_to(tier, write_id, number)
        except Failed as failed:
            self._why = str(failed.what)
        except Exception as error:
            self._why = told(error)
            with contextlib.suppress(Exception):  # without the job's store there is nobody to tell
                self._talk.fail(self._why)
        if self._why is not None and write_id:
            self._abandon(write_id)

    def _save_to(self, tier: Tier, write_id: str, number: int) -> None:
        def report(share: float) -> None:
            self.progress = (number + share) / len(self._tiers)

        self._write(tier, write_id, report)
        self._talk.count(f"{tier.name} written", 1)
        self._talk.all_done(f"{tier.name} written")
        whole = f"{tier.name} whole {tier.scope}"
        if tier.commits(self._talk.rank):
            content = self._content
            text = metadata.write(content.registry, content.files, content.document, write_id)
            tier.store.commit(f"{self.id}/{NAME}", text)
            self._talk.say(whole, True)
            self._prune(tier)
        self._talk.hear(whole)
        tier.saved(self.id)

    def _prune(self, tier: Tier) -> None:
        """What was saved is safe: that something old cannot be deleted is no reason to end a run."""
        try:
            tier.prune(self._owner.run_dir, self.id)
        except OSError as error:
            self._owner.note(f"an old checkpoint could not be deleted: {told(error)}")

    def _abandon(self, write_id: str) -> None:
        """A full disk should not stay full: this rank's file goes. What is whole already stays."""
        for tier in self._tiers:
            try:
                if not tier.has(self.id):
                    tier.abandon(self.id, f"{self.id}/{data_path(write_id, self._talk.rank)}")
            except OSError as error:
                self._owner.note(f"what is left of checkpoint {self.id} could not be deleted: {told(error)}")


def write_file(
    writer: WriterProcess,
    staging: Staging,
    file: File,
    write_id: str,
    target: Target | None,
    deadline: float,
    report: Callable[[float], None],
) -> None:
    """Have the writer process seal what is staged and write it to the target; durable on return. Raises OSError."""
    cells = [
        Cells(run.base, run.stride, run.nbytes, run.count, seal_start(write_id, run.name, run.box.offset))
        for run in file.runs
    ]
    memory = Memory(file.size, path=staging.path) if staging.path else Memory(file.size, fd=staging.fd)
    job = writer.write(memory, cells, target, deadline_seconds=deadline)
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
