"""Dumps of torch's Flight Recorder, written with the report of a hang if the recorder is enabled. Optional.

TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE sets the number of collectives that torch records per process,
with their sizes and states. A thread of each rank writes the dump when the hang watcher sends a signal, even while the
main thread is stuck in a collective.
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

ASKED_SECONDS = 2.0  # timeout for the dumps of all ranks of a machine; later dumps are not listed in the report
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # names in order of preference: the NCCL dump has more details


def listen(run_dir: str, rank: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Make this rank write a dump on signal `ANSWER`; return whether it will. Only works on the main thread."""
    dump = _find_dump() if any(environ.get(name, "0") not in ("", "0") for name in VARIABLES) else None
    if dump is None or ANSWER is None or threading.current_thread() is not threading.main_thread():
        return False
    answer_signal(ANSWER, partial(_write, dump, _get_path(run_dir, get_current().generation, rank)))
    return True


def collect(run_dir: Path, ranks: Sequence[Seen], seconds: float = ASKED_SECONDS) -> list[Path]:
    """Send a signal to the ranks of this machine, and return the dump files that they write in time."""
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
    """Return torch's private function that dumps the Flight Recorder; None if this version of torch has none."""
    import torch

    module = getattr(torch._C, "_distributed_c10d", None)
    return next((dump for name in DUMPS if (dump := getattr(module, name, None)) is not None), None)


def _get_path(run_dir: str | Path, generation: int, rank: int) -> Path:
    return Path(run_dir, "logs", f"flight-{generation}-rank-{rank:05d}.json")
