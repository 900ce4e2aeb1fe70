"""Choice of the files that a run reads and holds out. Torch-free; contents are read file by file, on demand."""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Set
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from gangline.errors import UserError
from gangline_basics.data import formats

# Folders that some distributions of Python lack, or that are not part of Python: the default corpus excludes them.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class TextFile:
    """A text file; `name` is its path relative to the common root of all files, with forward slashes."""

    path: str
    name: str
    size: int


@dataclass(frozen=True)
class FilePart:
    """A file, or the part of a file before or after byte `cut`, if the train/validation split divides the file."""

    file: TextFile
    cut: int | None = None
    after: bool = False

    def read(self, field: str = "text", binary: bool = False) -> list[bytes]:
        """Return the documents: the text of a plain file, or `field` of each line of a .jsonl.

        binary: also read files that do not look like text. Raises UserError if the file cannot be read.
        """
        path = self.file.path
        content = formats.read(path)
        # `cut` and `size` count compressed bytes
        cut = None if self.cut is None else self.cut * len(content) // self.file.size
        if formats.is_lines(path):
            lines, first = formats.read_lines(content, cut, self.after)
            return formats.read_documents(lines, path, field, first)
        if not binary:
            formats.refuse_binary(content, path)
        if cut is None:
            return [content]
        at = _find_line_end(content, cut)
        return [content[at:] if self.after else content[:at]]


def list_corpus(path: str | list[str] | None, fix: str = "data.path=null reads the built-in corpus.") -> list[TextFile]:
    """Return every file that `path` names, sorted by name; files, directories and globs may be mixed.

    Raises UserError, with the caller's advice, for files that are missing, empty or not readable.
    """
    if path is None:
        root = sysconfig.get_path("stdlib")
        return _list_files(_walk(root, skip=NOT_LIBRARY, suffix=".py"), path, root)
    paths: list[str] = []
    sources = [os.path.expanduser(one) for one in ([path] if isinstance(path, str) else path)]
    for one in sources:
        paths += _expand(one, fix)
    return _list_files(
        paths, path, os.path.commonpath([os.path.abspath(_find_root(one)) for one in sources]) if sources else None
    )


def _find_root(path: str) -> str:
    """Return the folder to which the file names of a path are relative, independent of the files in the folder."""
    if os.path.isdir(path):
        return path
    while glob.has_magic(path) and not os.path.exists(path):
        path = os.path.dirname(path)
    return path if os.path.isdir(path) else os.path.dirname(path)


def _expand(path: str, fix: str) -> list[str]:
    if os.path.isdir(path):
        paths = walk_files(path, skip={"__pycache__"})
        why = "The directory has no files; hidden files are not read."
    elif os.path.exists(path):
        check_regular(path)
        return [path]
    elif glob.has_magic(path):
        paths = find_files(path)
        why = "The pattern matches no file."
    else:
        paths, why = [], "There is no such file or directory" + ("." if os.path.isabs(path) else f" in {os.getcwd()}.")
    if not paths:
        raise UserError(f"data.path={path} names no files.", why, fix)
    return paths


def find_files(pattern: str) -> list[str]:
    """Return files that a glob matches, without directories and broken links. Raises UserError like `check_regular`."""
    paths = [file for file in glob.glob(pattern, recursive=True) if os.path.exists(file) and not os.path.isdir(file)]
    for file in paths:
        check_regular(file)
    return paths


def check_regular(path: str) -> None:
    """Raise UserError for a pipe, a socket and a device, without opening the file; a link is followed."""
    kind = os.stat(path).st_mode
    if not stat.S_ISREG(kind):
        name = "pipe" if stat.S_ISFIFO(kind) else "socket" if stat.S_ISSOCK(kind) else "device"
        raise UserError(
            f"{path} is a {name}, not a regular file.",
            "Text files are read more than once, and their sizes must be known first.",
            "Copy the text into a regular file, and name that file.",
        )


def _walk(root: str, skip: set[str], suffix: str = "") -> list[str]:
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths += [os.path.join(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return paths


def walk_files(root: str, skip: Set[str]) -> list[str]:
    """Return every regular file below a folder, except hidden files and folders with a name in `skip`.

    Raises UserError for a link that leads out of the folder or is broken, an irregular file, and a folder that cannot
    be read. A linked folder is not entered: its files are read under their real folder.
    """
    inside, paths, folders = os.path.realpath(root), [], [root]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_symlink():
                        _check_link(entry.path, inside, root)
                    if entry.is_file():
                        paths.append(entry.path)
                    elif not entry.is_dir():
                        raise UserError(
                            f"{entry.path} is not a regular file.",
                            f"All files below {root} are read as text.",
                            "Move the file to another directory.",
                        )
                    elif not entry.is_symlink() and entry.name not in skip:
                        folders.append(entry.path)
    except OSError as error:
        raise UserError(f"{error.filename or root} cannot be read.", error.strerror or str(error)) from error
    return paths


def _check_link(path: str, inside: str, root: str) -> None:
    target = os.path.realpath(path)
    if not os.path.exists(target):
        raise UserError(f"{path} is a link to {target}, which is missing.", "", f"Restore the target, or remove {path}")
    if os.path.commonpath([inside, target]) != inside:
        raise UserError(
            f"{path} is a link to {target}, which is outside of {root}.",
            "A directory stands for the files inside it, but a link could add any file of this machine.",
            f"Name {target} as well, or copy the target into {root}; "
            f"a pattern such as '{root.rstrip(os.sep)}/*' follows links.",
        )


def _list_files(paths: list[str], asked: str | list[str] | None, root: str | None = None) -> list[TextFile]:
    whole = [os.path.abspath(path) for path in dict.fromkeys(paths)]
    root = root or os.path.commonpath([os.path.dirname(path) for path in whole])
    files = []
    for path in whole:
        if not os.access(path, os.R_OK):
            raise UserError(f"data.path: {path} cannot be read.", "Permission denied.", f"chmod +r {path}")
        files.append(TextFile(path, Path(os.path.relpath(path, root)).as_posix(), os.path.getsize(path)))
    if not any(file.size for file in files):
        raise UserError(f"data.path={asked} is empty.", f"Number of files: {len(files)}, all of size 0.")
    return sorted(files, key=lambda file: file.name)


def split(files: list[TextFile], fraction: float, name: str) -> list[FilePart]:
    """Return the files of one split ("train" or "validation"), the same on every machine with the same files.

    Complete files are held out, chosen by a hash of their names, so that a file stays in its split when other files are
    added or removed. If the files are too few to choose from, the end of the concatenated text is held out instead.
    """
    held_out = {file for file in files if _hash_to_fraction(file.name) < fraction}
    if len(files) * fraction >= 1 and 0 < len(held_out) < len(files):
        return [FilePart(file) for file in files if (file in held_out) == (name == "validation")]
    total = sum(file.size for file in files)
    keep = total - round(total * fraction)
    pieces, start = [], 0
    for file in files:
        cut = keep - start
        if 0 < cut < file.size:
            pieces.append(FilePart(file, cut, after=name == "validation"))
        elif (cut <= 0) == (name == "validation"):
            pieces.append(FilePart(file))
        start += file.size
    return pieces


def _hash_to_fraction(name: str) -> float:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") / 2**64


def _find_line_end(content: bytes, at: int) -> int:
    """Return the end of the line that contains byte `at`, or in the last line the next UTF-8 boundary."""
    newline = content.find(b"\n", at)
    if 0 <= newline < len(content) - 1:
        return newline + 1
    while at < len(content) and content[at] & 0xC0 == 0x80:
        at += 1
    return at
