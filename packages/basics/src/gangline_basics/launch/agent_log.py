"""The log of an agent: torch's own messages, in a file of the run directory. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline.storage.files import open_own

LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")


class AgentLog(logging.FileHandler):
    """Loses lines on a full disk or in a directory that was deleted, and nothing else."""

    def _open(self) -> Any:
        return open_own(Path(self.baseFilename), "a")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line where that is possible."""
        with suppress(OSError, UserError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Say nothing: torch's words and Python's traceback would bury what the ranks have said."""

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            super().close()


@contextmanager
def divert_log(path: Path) -> Iterator[None]:
    """The agent's own messages go to a file: what they say of a failure is mostly about its followers."""
    handler = AgentLog(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
        handler.close()
