"""Client of a writer process: the trainer's side."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from gangline_ckpt_zarr.format.spans import ChunkSpan
from gangline_ckpt_zarr.save.writer.messages import Answer, StagedMemory, encode_request
from gangline_ckpt_zarr.stores.base import ObjectPath

_LAST_WORDS = 20  # maximum number of last lines of the process's standard error that an error quotes
_LINE = 500  # maximum bytes of a line; a longer line is split


class WriterClient:
    """Client of a process that writes staged bytes. A job starts the process, or restarts it, unless it is running.

    Jobs run in the order in which they were submitted. Every job ends with one answer that is `over`, also when the
    process dies. Several threads may use one client.
    """

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = tuple(fds)
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._jobs = 0
        self._open: set[int] = set()  # jobs without their last answer
        self._answers: list[Answer] = []
        self._ended: str | None = None  # how the process ended; None: it has not ended
        self._news = threading.Condition()
        self._sending = threading.RLock()

    def start(self, fds: Sequence[int] | None = None) -> None:
        """Start the process, which inherits the descriptors `fds` of this process; None: as at the last start."""
        with self._sending:
            new_fds = self._fds if fds is None else tuple(fds)
            if self.running and new_fds == self._fds:
                return
            self.close()
            self._fds, self._ended = new_fds, None
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "gangline_ckpt_zarr.save.writer.process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=self._fds,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
            self._listener = threading.Thread(target=self._listen, args=(self._process,), daemon=True, name="writer")
            self._listener.start()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def write(
        self,
        staging: StagedMemory,
        runs: Sequence[ChunkSpan | Sequence[int]],
        target: ObjectPath | Sequence[str] | None,
        *,
        deadline_seconds: float | None = None,
    ) -> int:
        """Submit a job that seals the staged bytes and writes them to the target, if any. Return the job's number.

        The caller must not change the memory until the job is over.
        """
        arguments = {"staging": asdict(staging), "runs": runs, "target": target, "deadline_seconds": deadline_seconds}
        return self._ask("write", arguments)

    def copy(
        self,
        source: ObjectPath | Sequence[str],
        target: ObjectPath | Sequence[str],
        size: int,
        runs: Sequence[ChunkSpan],
        *,
        deadline_seconds: float | None = None,
    ) -> int:
        """Submit a job that copies an object of `size` bytes and checks every chunk. Return the job's number.

        The answer's `chunk` names the first chunk that is bad or cannot be read.
        """
        arguments = {
            "source": source,
            "target": target,
            "size": size,
            "runs": runs,
            "deadline_seconds": deadline_seconds,
        }
        return self._ask("copy", arguments)

    def poll(self) -> list[Answer]:
        """Return the answers since the last call, in order. Never waits."""
        with self._news:
            answers, self._answers = self._answers, []
        return answers

    def wait(self, job: int, timeout: float | None = None) -> Answer:
        """Return the job's last answer; `poll` returns the answers of other jobs.

        Raises TimeoutError, or KeyError if the answer was already returned.
        """
        with self._news:
            if not self._news.wait_for(lambda: job not in self._open, timeout):
                raise TimeoutError(f"the writer process has not answered within {timeout:g} s")
            own = [answer for answer in self._answers if answer.job == job]
            self._answers = [answer for answer in self._answers if answer.job != job]
        if not own:
            raise KeyError(f"job {job} is unknown, or its last answer was already returned")
        return own[-1]

    def close(self, timeout: float | None = None) -> None:
        """Close the process once its jobs are done; after `timeout` seconds kill it."""
        with self._sending:
            process, listener = self._process, self._listener
            if process is None or listener is None or process.stdin is None:
                return
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
            listener.join()
            self._process = None

    def kill(self) -> None:
        """Kill the process; its current job fails."""
        if self._process is not None:
            self._process.kill()
            self.close()

    def give_up(self) -> None:
        """Kill the process without waiting for its end, which may be delayed until a hanging disk answers."""
        with self._sending:
            process, self._process = self._process, None
            if process is None:
                return
            process.kill()
            with self._news:
                self._end("the writer process was killed after no progress")

    def _ask(self, op: str, said: Mapping[str, object]) -> int:
        with self._sending:
            self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            with self._news:
                self._jobs += 1
                job = self._jobs
                self._open.add(job)
                if self._ended is not None:
                    self._fail(job, self._ended)
            with contextlib.suppress(OSError):  # the process has just died, as `_listen` reports
                process.stdin.write(encode_request(job, op, **said))
                process.stdin.flush()
            return job

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Record all answers until the process ends, for any reason; then fail every open job."""
        assert process.stdout is not None
        words: deque[str] = deque(maxlen=_LAST_WORDS)
        keeper = threading.Thread(target=_keep, args=(process, words), daemon=True, name="writer's last words")
        keeper.start()
        with process.stdout:
            for line in process.stdout:
                with contextlib.suppress(ValueError, TypeError):  # a truncated line
                    self._record_answer(Answer.parse(line))
        code = process.wait()
        keeper.join()
        how = f"was killed by {_name_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        why = f"the writer process {how}" + "".join(f"\n  {line}" for line in words)
        with self._news:
            if self._process is process:  # else `give_up` was called, and another process may be running
                self._end(why)

    def _end(self, why: str) -> None:
        self._ended = why
        for job in sorted(self._open):
            self._fail(job, why)

    def _record_answer(self, answer: Answer) -> None:
        with self._news:
            self._answers.append(answer)
            if answer.over:
                self._open.discard(answer.job)
            self._news.notify_all()

    def _fail(self, job: int, why: str) -> None:
        self._open.discard(job)
        self._answers.append(Answer(job, failed=why, kind="WriterDied"))
        self._news.notify_all()


def _keep(process: subprocess.Popen[bytes], words: deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr:
        while line := process.stderr.readline(_LINE):
            words.append(line.decode(errors="replace").rstrip())


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
