"""WebDataset tar files, whose members `KEY.jpg` and `KEY.txt` make a sample, with random access by byte offset.

When the source is built, all member headers of all files are read once. The list of samples takes 40 bytes of memory
per sample.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gangline import UserError
from gangline_dataloader.store.external.vector import get_file_size, sample
from gangline_dataloader.store.watch import WatchedFiles

KINDS = {"jpg": "image", "jpeg": "image", "png": "image", "txt": "text"}
PIECES = 16  # number of 4 KiB blocks of each file that are hashed into the identity
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst", ".tar.lz4")
NAMED = 8  # maximum number of files or folders named in a message
AGAIN = "Copy or write the file again."


@dataclass(frozen=True)
class ImageTexts:
    """The samples of some tar files, in order of file and member.

    file     (N,) index of the sample's tar file in `files`
    image    (N, 2) int64, offset and size of the image in bytes
    text     (N, 2) int64, offset and size of the text in bytes, without white space around it
    watched  detects changes of the files since they were listed
    """

    files: list[Path]
    file: np.ndarray
    image: np.ndarray
    text: np.ndarray
    watched: WatchedFiles

    def __len__(self) -> int:
        return len(self.file)

    def read(self, number: int) -> tuple[bytes, bytes]:
        """Read (encoded image, text) of a sample. Raises UserError if its tar file has changed or cannot be read."""
        path = self.files[int(self.file[number])]
        try:
            with path.open("rb") as file:
                image, text = (_read_bytes(file, *place[number].tolist()) for place in (self.image, self.text))
        except OSError as error:
            self.watched.look_at(path)
            raise UserError(f"{path} cannot be read.", error.strerror or str(error)) from error
        self.watched.look_at(path)  # after the read, so that a change during the read is noticed
        if (len(image), len(text)) != (sizes := (int(self.image[number, 1]), int(self.text[number, 1]))):
            raise UserError(
                f"{path} cannot be read.",
                f"Read {len(image)} bytes of the image and {len(text)} of the text; expected {sizes}.",
            )
        return image, text

    def find_image_name(self, number: int) -> str:
        """Find the member name of a sample's image. Reads the tar headers again: names are not in memory."""
        path, at = self.files[int(self.file[number])], int(self.image[number, 0])
        with path.open("rb") as file:
            return next(
                (member.name for member in _iterate_headers(path, file) if member.offset_data == at), "an image"
            )

    def compute_identity(self) -> str:
        """Compute a hash of names, sizes, member offsets and sampled blocks; changes elsewhere are not detected."""
        sizes = [(path.name, get_file_size(path)) for path in self.files]
        digest = blake2b(repr(sizes).encode(), digest_size=16)
        for array in (self.file, self.image, self.text):
            digest.update(np.ascontiguousarray(array).tobytes())
        for path in self.files:
            sample(path, digest, PIECES)
        return digest.hexdigest()


def _read_bytes(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def list_samples(folder: str) -> ImageTexts:
    """List every sample of a tar file, or of the tar files of a folder.

    Raises UserError if there are no samples, tar files are compressed or in nested folders, a file is damaged, or a
    sample lacks its image or text.
    """
    files = _list_tar_files(Path(folder).expanduser(), folder)
    if not files:
        raise UserError(f"data.path={folder} contains no tar files.", "WebDataset stores samples in NAME.tar.")
    number, images, texts, watched_files = [], [], [], WatchedFiles()
    for index, path in enumerate(files):
        get_file_size(path)
        watched_files.add(path, None)
        for image, text in _locate_samples(path):
            number.append(index)
            images.append(image)
            texts.append(text)
    if not number:
        raise UserError(f"data.path={folder} contains no samples: its tar files have no images.")
    return ImageTexts(files, np.array(number), np.array(images, np.int64), np.array(texts, np.int64), watched_files)


def _list_tar_files(root: Path, given: str) -> list[Path]:
    """List the tar files of a path. Raises UserError for compressed tar files, and for tar files in nested folders."""
    files = sorted(root.iterdir()) if root.is_dir() else [root]
    if compressed := [one.name for one in files if one.name.lower().endswith(COMPRESSED)]:
        archives = f"{len(compressed)} compressed tar files" if len(compressed) > 1 else "a compressed tar file"
        raise UserError(
            f"data.path={given} has {archives}: {', '.join(_truncate_names(compressed))}.",
            "Samples are read by byte offset, which a compressed file does not support.",
            "Decompress the files, for example `gunzip NAME.tar.gz`, or move them out of the folder.",
        )
    if not root.is_dir():
        return files
    below = []
    for place, folders, names in os.walk(root):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        if Path(place) != root and any(name.lower().endswith((".tar", *COMPRESSED)) for name in names):
            below.append(f"data.path={place}")
    if below:
        raise UserError(
            f"data.path={given} has tar files in subfolders.",
            "Subfolders are not read, so these tar files would be skipped.",
            "Move all tar files into one folder, or choose one folder:",
            *(f"  {one}" for one in _truncate_names(below)),
        )
    return [one for one in files if one.suffix.lower() == ".tar"]


def _truncate_names(names: list[str]) -> list[str]:
    return names if len(names) <= NAMED else [*names[:NAMED], f"and {len(names) - NAMED} more"]


def _locate_samples(path: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    with path.open("rb") as file:
        for member in _iterate_headers(path, file):
            folder, _, name = member.name.rpartition("/")
            key, _, ending = name.partition(".")
            kind, label = KINDS.get(ending.lower(), f".{ending}"), f"{path}: {member.name} at byte {member.offset}"
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise UserError(f"{label} is not a regular file.", "Write the shard without links and sparse files.")
            parts = samples.setdefault(f"{folder}/{key}", {})
            if kind in parts and kind in KINDS.values():
                why = f"A sample needs exactly one {kind}."
                raise UserError(f"{label} is the second {kind} of its sample.", why, "Give each sample its own key.")
            parts[kind] = (member.offset_data, member.size)
            if kind == "text":
                content = _read_bytes(file, *parts[kind])
                parts[kind] = (member.offset_data + len(content) - len(content.lstrip()), len(content.strip()))
    for key, parts in samples.items():
        for kind in ("image", "text"):
            if kind not in parts:
                part = "image (jpg, jpeg, png)" if kind == "image" else "text (txt)"
                raise UserError(
                    f"{path}: sample {key.lstrip('/')} has no {part}.", f"Members of the sample: {', '.join(parts)}."
                )
    return [(parts["image"], parts["text"]) for parts in samples.values()]


def _iterate_headers(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield every member of a tar file, then check that reading stopped at the end of the archive.

    tarfile takes an invalid header for the end of the archive, without an error, and skips all members after it.
    Raises UserError if the file is damaged or truncated.
    """
    size, stopped = get_file_size(path), 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and member.offset_data + member.size > size:
                    raise UserError(
                        f"{path} is damaged at byte {member.offset}: {member.name} should have {member.size} bytes.",
                        f"The tar file has {size} bytes and may be truncated.",
                        AGAIN,
                    )
                stopped = tar.offset
                yield member
    except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
        raise UserError(f"{path} cannot be read after byte {stopped}.", str(error), AGAIN) from error
    _require_end(path, file, stopped)


def _require_end(path: Path, file: BinaryIO, at: int) -> None:
    """Raise UserError unless the file holds only zeros from byte `at` on, at least one block."""
    file.seek(at)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) == tarfile.BLOCKSIZE and any(block):
        raise UserError(f"{path} is damaged at byte {at}: the header of a member is missing.", AGAIN)
    if len(block) < tarfile.BLOCKSIZE:
        raise UserError(
            f"{path} ends at byte {at + len(block)} without the end of a tar archive.",
            "A tar archive ends with blocks of zeros. The file may be truncated.",
            AGAIN,
        )
    place = file.tell()
    while chunk := file.read(1 << 20):
        if rest := chunk.lstrip(b"\0"):
            raise UserError(
                f"{path} has content at byte {place + len(chunk) - len(rest)}, after the end of the archive at {at}.",
                "A header was overwritten with zeros, or tar files were concatenated, which is not supported.",
                AGAIN,
            )
        place += len(chunk)
