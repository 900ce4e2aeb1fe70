"""Access to complete local copies of a store's files, one at a time, for commands that read every byte."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gangline import UserError
from gangline_dataloader.store.manifest import FILE, VALIDATION, Manifest, check_without_validation, read
from gangline_dataloader.store.remote.fetch import Remote
from gangline_dataloader.store.remote.tokens import is_remote

DEADLINE = 600.0  # timeout in seconds for a file of a remote store


class StoreFiles(ABC):
    """The files of a store.

    name    path or URL, for messages
    folder  local folder with the manifest and the pack plans
    """

    name: str
    folder: Path

    def read_manifest(self) -> Manifest:
        """Read the manifest. Raises UserError like `manifest.read`."""
        return read(self.folder)

    @abstractmethod
    @contextmanager
    def get_local_file(self, name: str, nbytes: int) -> Iterator[Path]:
        """Yield the local path of a file of `nbytes` bytes. Raises UserError if the file cannot be fetched."""

    @abstractmethod
    def read_small_file(self, name: str) -> bytes | None:
        """Read a small file; None if it is missing."""

    @abstractmethod
    def list_names(self) -> list[str]:
        """Return the names of the files; [] if the file system cannot list them."""

    @abstractmethod
    def open_held_out(self) -> StoreFiles | None:
        """Open the validation part; None if the store has none. Raises UserError if a recorded part is missing."""


class LocalFiles(StoreFiles):
    """The files of a store in a local directory."""

    def __init__(self, folder: Path) -> None:
        self.name, self.folder = str(folder), folder

    @contextmanager
    def get_local_file(self, name: str, nbytes: int) -> Iterator[Path]:
        yield self.folder / name

    def read_small_file(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None

    def list_names(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def open_held_out(self) -> LocalFiles | None:
        inside = LocalFiles(self.folder / VALIDATION)
        if (inside.folder / FILE).exists():
            return inside
        check_without_validation(self.read_manifest(), self.name)
        return None


class RemoteFiles(StoreFiles):
    """The files of a store behind a URL; manifest and pack plans are copied to the local `folder`."""

    def __init__(self, url: str, folder: Path) -> None:
        self.name, self.folder, self.remote = url.rstrip("/"), folder, Remote(url, DEADLINE)
        folder.mkdir(parents=True, exist_ok=True)
        if not self._copy(FILE):
            raise UserError(
                f"{url} is not a complete token store: {FILE} is missing.",
                "`gangline data prepare` writes the manifest last, and may have been interrupted.",
            )
        for name in self.remote.list_names():
            if name.startswith("pack-") and name.endswith(".json"):
                self._copy(name)

    def read_manifest(self) -> Manifest:
        return read(self.folder, self.name)

    def _copy(self, name: str) -> bool:
        content = self.remote.read_small_file(name, optional=name == FILE)
        if content is not None:
            (self.folder / name).write_bytes(content)
        return content is not None

    @contextmanager
    def get_local_file(self, name: str, nbytes: int) -> Iterator[Path]:
        path = self.folder / name
        try:
            self.remote.fetch(name, nbytes, path)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def read_small_file(self, name: str) -> bytes | None:
        return self.remote.read_small_file(name)

    def list_names(self) -> list[str]:
        return self.remote.list_names()

    def open_held_out(self) -> RemoteFiles | None:
        url = f"{self.name}/{VALIDATION}"
        if Remote(url, DEADLINE).read_small_file(FILE, optional=True) is not None:
            return RemoteFiles(url, self.folder / VALIDATION)
        check_without_validation(self.read_manifest(), self.name)
        return None


@contextmanager
def open_store_files(place: str) -> Iterator[StoreFiles]:
    """Open the files of a store in a directory or behind a URL; from a URL one shard file at a time is copied locally.

    Raises UserError if there is no store behind the URL.
    """
    if not is_remote(place):
        yield LocalFiles(Path(place).expanduser())
        return
    with tempfile.TemporaryDirectory(prefix="gangline-") as temporary:
        folder, url = Path(temporary, "store"), place.rstrip("/")
        if (around := url.removesuffix(f"/{VALIDATION}")) != url:
            # The parent store's manifest tells which shards belong to the validation part.
            if (content := Remote(around, DEADLINE).read_small_file(FILE, optional=True)) is not None:
                folder.mkdir()
                (folder / FILE).write_bytes(content)
            folder = folder / VALIDATION
        yield RemoteFiles(place, folder)
