"""WebDataset: tar files whose members `KEY.jpg` and `KEY.txt` are a sample. Read by place, so any sample comes at once.

The members of all files are listed when the source is built: one look at each header, 80 bytes a sample in memory.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from gangline import UserError

IMAGES = ("jpg", "jpeg", "png")


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

    Raises UserError where there is none, or a sample has no image or no text.
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
    try:
        size = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                key, _, kind = name.partition(".")
                if member.isfile():
                    if member.offset_data + member.size > size:
                        raise UserError(
                            f"{path} is damaged: {member.name} has {member.size} bytes, it says.",
                            f"The file has {size} bytes. It may be torn.",
                        )
                    kind = "image" if kind.lower() in IMAGES else kind.lower()
                    found.setdefault(f"{folder}/{key}", {})[kind] = (member.offset_data, member.size)
    except (OSError, tarfile.TarError, ValueError, OverflowError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    for key, parts in found.items():
        for kind in ("image", "txt"):
            if kind not in parts:
                wanted = "image (jpg, jpeg, png)" if kind == "image" else "text (txt)"
                raise UserError(f"{path}: sample {key.lstrip('/')} has no {wanted}.", f"It has {', '.join(parts)}.")
    return [(parts["image"], parts["txt"]) for parts in found.values()]
