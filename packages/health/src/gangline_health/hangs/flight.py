"""Dumps of torch's Flight Recorder next to the report of a hang, if the recorder is turned on. Never required.

TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE sets how many collectives of a process torch records, with sizes
and states. A thread of each rank writes the dump when the watcher sends a signal, also while the main thread is in a
transfer that does not end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from gangline.launch.signals import ANSWER, answer_signal
from gangline.pulse.write import get_current
from gangline.storage.files import write_whole
from gangline_health.hangs import processes
from gangline_health.pulses import Seen

ASKED_SECONDS = 2.0  # for all ranks of a machine together; a rank without a dump by then is left out
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # NCCL's dump holds more, if torch has both


def listen(run_dir: str, rank: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Make this rank write a dump on a signal, and return whether it will. Call it on the main thread."""
    dump = _find_dump() if any(environ.get(name, "0") not in ("", "0") for name in VARIABLES) else None
    if dump is None or ANSWER is None or threading.current_thread() is not threading.main_thread():
        return False
    answer_signal(ANSWER, partial(_write, dump, _get_path(run_dir, get_current().generation, rank)))
    return True


def collect(run_dir: Path, ranks: Sequence[Seen], seconds: float = ASKED_SECONDS) -> list[Path]:
    """Return the dumps that ranks of this machine write on a signal; a rank that cannot answer writes none."""
    pulses = [
        pulse for pulse in ranks if ANSWER is not None and _answers_signal(pulse) and processes.kill(pulse, ANSWER)
    ]
    paths = [_get_path(run_dir, pulse.generation, pulse.rank) for pulse in pulses]
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [path for path in paths if path.exists()]


def _answers_signal(seen: Seen) -> bool:
    return (
        ANSWER is not None
        and processes.read_state(seen.pid)[0] not in ("T", "")
        and processes.handles(seen.pid, ANSWER)
    )


def _write(dump: Callable[[], bytes | str], place: Path) -> None:
    content = dump()
    write_whole(place, content.decode(errors="replace") if isinstance(content, bytes) else content)


def _find_dump() -> Callable[[], bytes | str] | None:
    """Return torch's private function that dumps the recorder, in whatever version; None if torch has none."""
    import torch

    module = getattr(torch._C, "_distributed_c10d", None)
    return next((dump for name in DUMPS if (dump := getattr(module, name, None)) is not None), None)


def _get_path(run_dir: str | Path, generation: int, rank: int) -> Path:
    return Path(run_dir, "logs", f"flight-{generation}-rank-{rank:05d}.json")
