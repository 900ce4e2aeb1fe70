"""Decompression of files by file name extension: gzip, bzip2, xz and zstd. Torch-free."""

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

_PIECE = 1 << 14  # number of compressed bytes read at a time; zstandard decompresses all of them into memory
_BUFFER = 1 << 18


class _Streams(io.RawIOBase):
    """Reader of the decompressed content of concatenated streams. Raises EOFError if the last stream is incomplete.

    The libraries' own readers do not report this damage: bz2 and lzma end before a damaged stream, and zstandard ends
    inside an incomplete stream.

    start    function that creates the decompressor of a stream
    most     (maximum number of bytes per decompress call,), or () for decompressors without that argument
    padding  divisor of the number of zero bytes between streams; 0: no padding
    """

    def __init__(self, raw: BinaryIO, start: Callable[[], Any], most: tuple[int, ...] = (), padding: int = 0) -> None:
        self._raw, self._start, self._most, self._padding = raw, start, most, padding
        self._stream: Any = start()
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self._stream.eof:
                self._skip_padding()
                if not self._read_more():
                    return 0
                self._stream = self._start()
            if getattr(self._stream, "needs_input", True) and not self._read_more():
                raise EOFError("Compressed file ended before the end of its last stream")
            self._output = self._stream.decompress(self._input, *self._most)
            self._input = self._stream.unused_data
        size = min(len(buffer), len(self._output))
        buffer[:size], self._output = self._output[:size], self._output[size:]
        return size

    def _read_more(self) -> bool:
        """Read input if the input buffer is empty, and return False at the end of the file."""
        self._input = self._input or self._raw.read(_PIECE)
        return bool(self._input)

    def _skip_padding(self) -> None:
        zeros = 0
        while self._padding and self._read_more() and self._input[0] == 0:
            rest = self._input.lstrip(b"\0")
            zeros, self._input = zeros + len(self._input) - len(rest), rest
        if self._padding:
            # a remainder of zero bytes is not valid padding, so the decompressor must reject it
            self._input = bytes(zeros % self._padding) + self._input


def _open_zstd(raw: BinaryIO) -> _Streams:
    import zstandard

    return _Streams(raw, zstandard.ZstdDecompressor().decompressobj)


def _add_buffer(streams: _Streams) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(streams, _BUFFER))


_READERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": lambda raw: _add_buffer(_Streams(raw, bz2.BZ2Decompressor, (_BUFFER,))),
    ".xz": lambda raw: _add_buffer(_Streams(raw, lzma.LZMADecompressor, (_BUFFER,), padding=4)),
    ".zst": lambda raw: _add_buffer(_open_zstd(raw)),
}
COMPRESSED = tuple(_READERS)  # file name extensions
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


def find_compression(path: str) -> str:
    """Return the file name extension of the compression, or "" for an uncompressed file."""
    return next((ending for ending in COMPRESSED if path.lower().endswith(ending)), "")


@contextmanager
def open_decompressed(
    path: str, *, ending: str | None = None, source: Callable[[], BinaryIO] | None = None, prefix: str = ""
) -> Iterator[BinaryIO]:
    """Open the file `path` as a stream of decompressed bytes. Raises UserError for read errors, also inside the block.

    ending  extension that selects the compression; None: the extension of `path`
    source  function that opens the file, if it is not on this machine
    prefix  text before the path in error messages ("data.path: ")
    """
    reader = _READERS.get(find_compression(path) if ending is None else ending, lambda raw: raw)
    try:
        with open(path, "rb") if source is None else source() as raw:
            yield reader(raw)
    except ModuleNotFoundError as error:
        if error.name != "zstandard":
            raise
        why = "Zstandard files require the package zstandard:  pip install zstandard"
        raise UserError(f"{prefix}{path} cannot be read.", why) from error
    except _DAMAGE as error:
        raise UserError(f"{prefix}{path} is damaged, or its format differs from its extension.", str(error)) from error
    except OSError as error:
        raise UserError(f"{prefix}{path} cannot be read.", error.strerror or str(error)) from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "zstandard":  # matched by name, because it may not be installed
            raise
        raise UserError(f"{prefix}{path} is damaged, or its format differs from its extension.", str(error)) from error
