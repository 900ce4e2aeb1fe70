"""Whose files a run directory holds, and how they are opened: never through a link to write, never a pipe or a device.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shlex
import stat
import tempfile
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from gangline.errors import UserError

_CHECKPOINTS = "checkpoints"
# A link in place of one of these leads what a run writes, and deletes, to another directory.
_FOLDERS = ("logs", "launch", "tensorboard", "track", ".meeting", ".memory")
DOCUMENT_BYTES = 1 << 28  # maximum size of a file that holds one document, such as config.yaml
LINES_BYTES = 1 << 30  # maximum size of a file that grows while the run lives, such as events.jsonl
STREAM_BYTES = 1 << 33  # maximum size of a file that is read line by line, such as metrics.jsonl
_KINDS = {
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFDIR: "folder",
}


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file of a run directory for writing.

    Raises OSError where a symbolic link is in its place, and UserError for a pipe or device, as `handle_of` does.
    """
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering, encoding, opener=lambda name, flags: handle_of(name, flags | os.O_NOFOLLOW))


def open_regular(path: str | Path, limit: int = STREAM_BYTES) -> BinaryIO:
    """Open a file of a run directory for reading, in binary.

    Raises UserError for a pipe, a device, and a file of more than `limit` bytes; OSError where it cannot be opened.
    """
    return cast(BinaryIO, open(path, "rb", opener=lambda name, flags: _within(limit, name, handle_of(name, flags))))


def read_regular(path: str | Path, limit: int = DOCUMENT_BYTES) -> bytes:
    """Return the content of a file of a run directory; raises what `open_regular` does."""
    with open_regular(path, limit) as file:
        return file.read()


def handle_of(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Return the handle of a regular file, opened with these flags of `os.open`.

    Raises UserError at once for all else, such as a named pipe, for which opening or reading it would wait for ever.
    Raises OSError where it cannot be opened.
    """
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that is opened for writing and has no reader, or a socket
            raise _not_regular(path, os.stat(path).st_mode) from None
        raise
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise _not_regular(path, kind)
    os.set_blocking(handle, True)
    return handle


def _within(limit: int, path: str, handle: int) -> int:
    if (size := os.fstat(handle).st_size) > limit:
        os.close(handle)
        raise UserError(
            f"{path} has {size:,} bytes, and a run writes at most {limit:,} into it.",
            "Reading it would take the memory of this machine.",
            f"Find out what wrote it, and move it away:  mv {shlex.quote(path)} ELSEWHERE",
        )
    return handle


def _not_regular(path: str | Path, kind: int) -> UserError:
    why = "Reading it would wait for the program that writes into it."
    if stat.S_ISDIR(kind):
        why = "There should be a file of this name."
    return UserError(
        f"{path} is a {_KINDS.get(stat.S_IFMT(kind), 'special file')}, not a regular file.",
        why,
        f"Find out who put it there, and move it away:  mv {shlex.quote(str(path))} ELSEWHERE",
    )


def refuse_planted(run_dir: Path) -> None:
    """Raise UserError where somebody else could have chosen the files that a run in this directory writes to.

    That is a directory of another user (root may use it), a symbolic link out of it in the place of a file or folder of
    the run, a pipe or device, and what other users have put into a folder that they can write to. `checkpoints` may be
    a link to a directory. Raises OSError where the directory cannot be read.
    """
    owner, user = run_dir.stat().st_uid, os.geteuid()
    if user != 0 and owner not in (0, user, _user_in(run_dir)):
        raise UserError(
            f"{run_dir} belongs to {_name_of(owner)}, who can choose what a run in it reads and writes.",
            "Copy it, look at config.yaml in the copy, and go on there:",
            f"cp -r {shlex.quote(str(run_dir))} COPY; train resume=COPY",
        )
    folders = [run_dir]
    for folder in folders:  # it grows by those of the first one
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            shared = bool(folder.stat().st_mode & 0o022)  # its group or others can write
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another node's
                    _refuse(entry, run_dir, (0, user, owner) if shared else ())
                if folder is run_dir and entry.name != _CHECKPOINTS and entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))


def _refuse(entry: os.DirEntry[str], run_dir: Path, users: tuple[int, ...]) -> None:
    """Raise UserError for a link out of the directory, a pipe or device, and an owner other than `users` (if any)."""
    if entry.is_symlink() and _leads_out(entry, run_dir):
        raise UserError(
            f"{entry.path} is a symbolic link to {os.readlink(entry.path)}, out of the run directory.",
            "A run would write there: by such links whoever made the directory overwrites your files.",
            f"rm {shlex.quote(entry.path)}",
        )
    found = entry.stat(follow_symlinks=False)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        raise _not_regular(entry.path, found.st_mode)
    if users and (uid := found.st_uid) not in users:
        raise UserError(
            f"{entry.path} belongs to {_name_of(uid)}: other users can write to this run directory.",
            "A run goes on only from files of the user who owns the directory.",
            f"rm -r {shlex.quote(entry.path)}; chmod -R go-w {shlex.quote(str(run_dir))}",
        )


def _leads_out(entry: os.DirEntry[str], run_dir: Path) -> bool:
    """Whether a link leaves the run directory, and is no directory that the user may have put beside the run's own."""
    if Path(os.path.realpath(entry.path)).is_relative_to(os.path.realpath(run_dir)):
        return False
    return not (Path(entry.path).parent == run_dir and entry.is_dir() and entry.name not in _FOLDERS)


def _user_in(folder: Path) -> int:
    """Return the user that new files there belong to: a share may map all users to one."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()


def refuse_others(path: Path) -> None:
    """Raise UserError where somebody else made this file or folder, or a symbolic link is in its place."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        why = f"is a symbolic link to {os.readlink(path)}"
    elif found.st_uid not in (os.geteuid(), _user_in(path.parent)):
        why = f"belongs to {_name_of(found.st_uid)}"
    else:
        return
    raise UserError(
        f"{path} {why}.",
        "The user who put it there could choose where this run goes on, or which file is overwritten.",
        f"rm -r {shlex.quote(str(path))}",
    )


def _name_of(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
