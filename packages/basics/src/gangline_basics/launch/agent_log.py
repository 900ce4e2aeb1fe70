"""Log file of an elastic agent in the run directory, for torch's own messages. Torch-free."""

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
    """Log handler that drops lines instead of failing if the disk is full or the directory was deleted."""

    def _open(self) -> Any:
        return open_own(Path(self.baseFilename), "a")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, unless the file cannot be written."""
        with suppress(OSError, UserError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore an error of logging: its traceback would bury the output of the ranks."""

    def close(self) -> None:
        """Close the file, ignoring an OSError."""
        with suppress(OSError):
            super().close()


@contextmanager
def divert_log(path: Path) -> Iterator[None]:
    """Divert the log of torch's agent to a file, because after a failure most lines are consequences, not the cause."""
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
