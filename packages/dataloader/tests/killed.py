"""Kills of `gangline data prepare`, each time one system call later, and a report of the files left.

    python killed.py OUT_OF_ALL REFERENCE SCRATCH prepare WORDS ... {out}

Every audited event that touches a file (open, rename, remove, mkdir, rmdir) is a place to be killed at. After each kill
the store is either as it was before the call, or as the call makes it; then the call is made again, undisturbed, and
has to give the bytes of REFERENCE.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a folder, by relative path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def child(work: Callable[[], None], kill_at: int, out: Path) -> bool:
    """Run `work` in a process that is killed at that event below `out`; return whether it finished."""
    if (pid := os.fork()) == 0:
        left = kill_at

        def audit(event: str, arguments: tuple) -> None:
            nonlocal left
            if event in EVENTS and str(arguments[0]).startswith(str(out)):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(audit)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return False
    assert os.waitstatus_to_exitcode(status) == 0, "an undisturbed call ends well"
    return True


def main(every: int, before: Path | None, reference: Path, out: Path, work: Sequence[str]) -> None:
    from gangline_dataloader import commands
    from gangline_dataloader.store.manifest import FILE, VALIDATION, read

    def call() -> None:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            assert commands.main([*work, "--out", str(out)]) == 0

    wanted, kills = contents(reference), 0
    old = contents(before) if before else None
    for kill_at in range(1, 10_000, every):
        shutil.rmtree(out, ignore_errors=True)
        if before:
            shutil.copytree(before, out)
        ended = child(call, kill_at, out)
        if not ended:
            kills += 1
            if before:  # the store must equal the old one or the new one
                assert old is not None
                said = (out / FILE).read_bytes()
                known = old if said == old[FILE] else wanted
                here = contents(out)
                lost = [name for name in known if name != f"{VALIDATION}/{FILE}" and here.get(name) != known[name]]
                assert not lost, f"killed at {kill_at}: {lost}"
                held_out = (before if said == old[FILE] else reference) / VALIDATION
                assert read(out / VALIDATION).compute_identity() == read(held_out).compute_identity(), (
                    f"killed at {kill_at}"
                )
                assert commands.main(["verify", str(out)]) == 0, f"killed at {kill_at}"
            assert child(call, 0, out)
        here = contents(out)
        assert here == wanted, f"killed at {kill_at}: {sorted(here.keys() ^ wanted.keys())}"
        if ended:
            break
    print(f"{kills} kills")


if __name__ == "__main__":
    every, before, reference, out, *work = sys.argv[1:]
    main(int(every), Path(before) if before != "-" else None, Path(reference), Path(out), work)
