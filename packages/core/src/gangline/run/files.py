"""Ownership of files in a run directory: other users must not control what a run reads and writes. Torch-free."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
import tempfile
from pathlib import Path

from gangline.errors import UserError
from gangline.storage.files import make_special_file_error

_CHECKPOINTS = "checkpoints"
# Folders of a run; a link in place of a folder would make the run write and delete in another directory.
_FOLDERS = ("logs", "launch", "tensorboard", "track", ".meeting", ".memory")


def refuse_planted(run_dir: Path) -> None:
    """Raise UserError if another user could control the files that a run in this directory writes to.

    Refused are a directory of another user (unless root runs), a symbolic link out of the directory in place of a file
    or folder of the run, a pipe or device, and other users' files in a folder that other users can write to.
    `checkpoints` may be a link to a directory. Raises OSError if the directory cannot be read.
    """
    owner, user = run_dir.stat().st_uid, os.geteuid()
    if user != 0 and owner not in (0, user, _find_user(run_dir)):
        raise UserError(
            f"{run_dir} belongs to {_name_of(owner)}, who can control what a run in this directory reads and writes.",
            "Copy the directory, check config.yaml in the copy, and continue the run there:",
            f"cp -r {shlex.quote(str(run_dir))} COPY; train resume=COPY",
        )
    folders = [run_dir]
    for folder in folders:  # the loop appends the subfolders of `run_dir`
        with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
            shared = bool(folder.stat().st_mode & 0o022)  # whether group or others can write
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another node removed it
                    _refuse(entry, run_dir, (0, user, owner) if shared else ())
                if folder is run_dir and entry.name != _CHECKPOINTS and entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))


def _refuse(entry: os.DirEntry[str], run_dir: Path, users: tuple[int, ...]) -> None:
    """Raise UserError for a link out of the directory, a pipe or device, and an owner not in `users` (if not empty)."""
    if entry.is_symlink() and _leads_out(entry, run_dir):
        raise UserError(
            f"{entry.path} is a symbolic link to {os.readlink(entry.path)}, outside of the run directory.",
            "A run would follow the link and could overwrite files outside of its directory.",
            f"rm {shlex.quote(entry.path)}",
        )
    status = entry.stat(follow_symlinks=False)
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
        raise make_special_file_error(entry.path, status.st_mode)
    if users and (uid := status.st_uid) not in users:
        raise UserError(
            f"{entry.path} belongs to {_name_of(uid)}: other users can write to this run directory.",
            "A run uses only files of the user who owns the run directory.",
            f"rm -r {shlex.quote(entry.path)}; chmod -R go-w {shlex.quote(str(run_dir))}",
        )


def _leads_out(entry: os.DirEntry[str], run_dir: Path) -> bool:
    """Return whether a link leaves the run directory, unless it is a link to a directory that the user may place."""
    if Path(os.path.realpath(entry.path)).is_relative_to(os.path.realpath(run_dir)):
        return False
    return not (Path(entry.path).parent == run_dir and entry.is_dir() and entry.name not in _FOLDERS)


def _find_user(folder: Path) -> int:
    """Return the uid that owns new files in a folder: a network share may map all users to one uid."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return os.geteuid()


def refuse_others(path: Path) -> None:
    """Raise UserError if `path` belongs to another user or is a symbolic link."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        why = f"is a symbolic link to {os.readlink(path)}"
    elif status.st_uid not in (os.geteuid(), _find_user(path.parent)):
        why = f"belongs to {_name_of(status.st_uid)}"
    else:
        return
    raise UserError(
        f"{path} {why}.",
        "Another user could thereby choose which run is continued, or which file is overwritten.",
        f"rm -r {shlex.quote(str(path))}",
    )


def _name_of(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
