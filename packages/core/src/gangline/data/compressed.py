"""The bytes of a file, decompressed as the ending of its name says. Torch-free."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from gangline.errors import UserError


class _ZstdFrames(io.RawIOBase):
    """The content of Zstandard frames, one after another. Raises EOFError where the last one is incomplete.

    zstandard's own reader returns what it has of an incomplete frame as if the file ended there.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._raw, self._open = raw, zstandard.ZstdDecompressor().decompressobj
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            self._input = self._input or self._raw.read(_PIECE)
            if not self._input and self._frame is None:
                return 0
            if not self._input:
                raise EOFError("Compressed file ended before the end of its last Zstandard frame")
            self._frame = self._frame or self._open()
            self._output = self._frame.decompress(self._input)
            self._input = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size


def _zstd(raw: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_ZstdFrames(raw), _BUFFER))


_PIECE = 1 << 14  # compressed bytes at once: what they expand to is in memory
_BUFFER = 1 << 18
_READERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstd,
}
COMPRESSED = tuple(_READERS)  # endings of names
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def compression(path: str) -> str:
    """The ending that says how a file is compressed, "" for one that is not."""
    return next((ending for ending in COMPRESSED if path.lower().endswith(ending)), "")


@contextmanager
def decompressed(
    path: str, *, ending: str | None = None, source: Callable[[], BinaryIO] | None = None, said: str = ""
) -> Iterator[BinaryIO]:
    """The bytes of the file `path`, as a stream. Raises UserError where they cannot be read, also within.

    ending: how it is compressed, where not its name says so. source: opens it, where it is no file of this machine.
    said: before the path in what is raised ("data.path: ").
    """
    reader = _READERS.get(compression(path) if ending is None else ending, lambda raw: raw)
    try:
        with open(path, "rb") if source is None else source() as raw:
            yield reader(raw)
    except ModuleNotFoundError as error:
        if error.name != "zstandard":
            raise
        why = "Zstandard is read by the package zstandard:  pip install zstandard"
        raise UserError(f"{said}{path} cannot be read.", why) from error
    except _DAMAGE as error:
        raise UserError(f"{said}{path} is damaged, or not what its name says.", str(error)) from error
    except OSError as error:
        raise UserError(f"{said}{path} cannot be read.", error.strerror or str(error)) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "zstandard":  # which need not be installed
            raise
        raise UserError(f"{said}{path} is damaged, or not what its name says.", str(error)) from error
