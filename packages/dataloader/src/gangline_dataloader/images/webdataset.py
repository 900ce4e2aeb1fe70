"""WebDataset: tar files whose members `KEY.jpg` and `KEY.txt` are a sample. Read by place, so any sample comes at once.

The members of all files are listed when the source is built: one look at each header, 80 bytes a sample in memory.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gangline import UserError
from gangline_dataloader.store.foreign.vector import size_of

IMAGES = ("jpg", "jpeg", "png")
AGAIN = "Copy or write the file again."


@dataclass(frozen=True)
class ImageTexts:
    """The samples of some tar files, in order of file and member.

    file   (N,) which of `files`
    image  (N, 2) int64, first byte and size of the image
    text   (N, 2) and of the text
    """

    files: list[Path]
    file: np.ndarray
    image: np.ndarray
    text: np.ndarray

    def __len__(self) -> int:
        return len(self.file)

    def read(self, number: int) -> tuple[np.ndarray, bytes]:
        """(the encoded image (n,) uint8, the text) of a sample. Raises UserError where the file is shorter now."""
        path = self.files[int(self.file[number])]
        parts = []
        with path.open("rb") as file:
            for at, size in (self.image[number].tolist(), self.text[number].tolist()):
                file.seek(at)
                content = file.read(size)
                if len(content) != size:
                    raise UserError(f"{path} is shorter than when it was listed.", f"{size} bytes at {at} are gone.")
                parts.append(content)
        return np.frombuffer(parts[0], np.uint8), parts[1]

    def identity(self) -> str:
        """Changes with names, places and sizes; a byte of an image that changes is not seen."""
        digest = blake2b(repr([path.name for path in self.files]).encode(), digest_size=16)
        for array in (self.file, self.image, self.text):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def listed(folder: str) -> ImageTexts:
    """Every sample of a tar file, or of the tar files of a folder.

    Raises UserError where there is none, a file is damaged, or a sample has no image or no text.
    """
    root = Path(folder).expanduser()
    files = sorted(root.glob("*.tar")) if root.is_dir() else [root]
    if not files:
        raise UserError(f"data.path={folder} holds no tar files.", "WebDataset keeps samples in NAME.tar.")
    number, images, texts = [], [], []
    for index, path in enumerate(files):
        for image, text in _members(path):
            number.append(index)
            images.append(image)
            texts.append(text)
    if not number:
        raise UserError(f"data.path={folder} holds no images.")
    return ImageTexts(files, np.array(number), np.array(images, np.int64), np.array(texts, np.int64))


def _members(path: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    with path.open("rb") as file:
        for member in _headers(path, file):
            folder, _, name = member.name.rpartition("/")
            key, _, kind = name.partition(".")
            if member.isfile():
                kind = "image" if kind.lower() in IMAGES else kind.lower()
                found.setdefault(f"{folder}/{key}", {})[kind] = (member.offset_data, member.size)
    for key, parts in found.items():
        for kind in ("image", "txt"):
            if kind not in parts:
                wanted = "image (jpg, jpeg, png)" if kind == "image" else "text (txt)"
                raise UserError(f"{path}: sample {key.lstrip('/')} has no {wanted}.", f"It has {', '.join(parts)}.")
    return [(parts["image"], parts["txt"]) for parts in found.values()]


def _headers(path: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Every member of a tar file, then a check that reading stopped at the end of the archive.

    tarfile takes an invalid header for the end and reports nothing, so the members behind it would be dropped.
    """
    size, stopped = size_of(path), 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                if member.isfile() and member.offset_data + member.size > size:
                    raise UserError(
                        f"{path} is damaged at byte {member.offset}: {member.name} has {member.size} bytes, it says.",
                        f"The file has {size} bytes. It may be truncated.",
                        AGAIN,
                    )
                stopped = tar.offset
                yield member
    except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
        raise UserError(f"{path} cannot be read behind byte {stopped}.", str(error), AGAIN) from error
    _require_end(path, file, stopped)


def _require_end(path: Path, file: BinaryIO, at: int) -> None:
    """Raise UserError unless zeros alone stand from byte `at` on, one block of them at least."""
    file.seek(at)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) == tarfile.BLOCKSIZE and any(block):
        raise UserError(f"{path} is damaged at byte {at}: no header of a member stands there.", AGAIN)
    if len(block) < tarfile.BLOCKSIZE:
        raise UserError(
            f"{path} ends at byte {at + len(block)} without the end of a tar archive.",
            "Blocks of zeros end an archive. The file may be truncated.",
            AGAIN,
        )
    place = file.tell()
    while chunk := file.read(1 << 20):
        if rest := chunk.lstrip(b"\0"):
            raise UserError(
                f"{path} has content at byte {place + len(chunk) - len(rest)} behind the end of the archive at {at}.",
                "A header was overwritten with zeros, or tar files were joined: each has to be a file of its own.",
                AGAIN,
            )
        place += len(chunk)
