"""Token store behind a URL, with shards in a local cache."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

import numpy as np

from gangline import UserError
from gangline.storage.files import write_whole
from gangline_dataloader.store.manifest import FILE, VALIDATION, name_ends_file, name_loss_file, name_tokens_file
from gangline_dataloader.store.npy import compute_file_size, map_file
from gangline_dataloader.store.remote.cache import FileCache
from gangline_dataloader.store.remote.fetch import Remote
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.watch import WatchedFiles

FETCHERS = 2  # shards that are prefetched at once: one arrives while the checksum of another is verified
OPEN = 32  # maximum number of mapped shards; an evicted file that is still mapped keeps its disk space


def is_remote(path: str) -> bool:
    """Return whether a path is a URL."""
    return "://" in path


class RemoteTokens(StoreTokens):
    """A store behind a URL. Complete shards are fetched into a cache when they are read or announced.

    url       URL of the store
    cache     shard cache, shared by all stores and ranks of a machine
    deadline  maximum seconds that a read waits for a shard
    files     other files to copy, next to the manifest and the tokenizer

    Manifest, plan and tokenizer are copied each time the store is opened, because they are small and may change.
    Raises UserError if there is no store at the URL.
    """

    distant = True

    def __init__(self, url: str, cache: FileCache, deadline: float, files: Iterable[str] = ()) -> None:
        self.remote, self.cache = Remote(url, deadline), cache
        folder, around = _locate_folder(cache, self.remote.url), self.remote.url.removesuffix(f"/{VALIDATION}")
        if around != self.remote.url:  # the parent store's manifest tells which shards belong to the validation part
            folder = _locate_folder(cache, around) / VALIDATION
        folder.mkdir(exist_ok=True, parents=True)
        if around != self.remote.url:
            _copy(Remote(around, deadline), folder.parent, FILE, optional=True)
        if not _copy(self.remote, folder, FILE):
            raise UserError(
                f"{url} is not a complete token store: {FILE} is missing.",
                "`gangline data prepare` writes the manifest last, and may have been interrupted.",
            )
        super().__init__(folder, url, keep=OPEN)
        self._watched = WatchedFiles(cached=True)
        about = self.manifest.tokenizer
        for name in (*([] if about.file is None else [about.file]), *about.beside, *files):
            _copy(self.remote, folder, name)
        self._wanted: SimpleQueue[int] = SimpleQueue()
        self._recent: list[int] = []  # shards that were prefetched, or are being prefetched
        self._workers: list[threading.Thread] = []
        self._changing = threading.Lock()  # guards `_recent` and `_workers`

    def map_shard_file(
        self, name: str, dtype: str, length: int, xxh3: str, pieces_xxh3: str | None = None
    ) -> np.ndarray:
        with self._open_cached(name, compute_file_size(dtype, length), xxh3) as file:
            self._watched.add(Path(file.name), xxh3)
            return map_file(file, dtype, length)

    def look_again(self) -> None:
        self._watched.look()

    def find_file_sizes(self, names: Sequence[str]) -> dict[str, int | None]:
        return self.remote.find_file_sizes(names)

    def compute_shard_bytes(self) -> np.ndarray:
        """Compute the bytes of the files of each shard, (number of shards,) int64, without the files of a pack plan."""
        shards, tokens = self.manifest.shards, np.array(self.manifest.shards.tokens, np.int64)
        nbytes = compute_file_size(self.dtype, tokens) + compute_file_size("<u4", np.array(shards.documents, np.int64))
        return nbytes + compute_file_size("|u1", tokens) if self.masked else nbytes

    def _open_cached(self, name: str, nbytes: int, xxh3: str) -> BinaryIO:
        return self.cache.open(name, nbytes, xxh3, lambda path: self.remote.fetch(name, nbytes, path))

    def announce(self, starts: np.ndarray) -> None:
        """Prefetch the shards that hold the tokens `starts`, in threads."""
        for shard in np.unique(np.searchsorted(self._starts, starts, side="right") - 1).tolist():
            self._wanted.put(shard)
        with self._changing:
            while len(self._workers) < FETCHERS:
                self._workers.append(threading.Thread(target=self._fetch_ahead, name="fetch-ahead", daemon=True))
                self._workers[-1].start()

    def _fetch_ahead(self) -> None:
        """Fetch announced shards, forever. Ignores failures: the read that needs the shard retries and reports them."""
        while True:
            try:
                shard = self._wanted.get(timeout=60.0)
            except Empty:
                continue
            with self._changing:
                if shard in self._recent:
                    continue
                self._recent = [*self._recent[-OPEN:], shard]
            entry = self.manifest.shards[shard]
            try:
                self._open_cached(
                    name_tokens_file(shard), compute_file_size(self.dtype, entry.tokens), entry.xxh3
                ).close()
                self._open_cached(
                    name_ends_file(shard), compute_file_size("<u4", entry.documents), entry.ends_xxh3
                ).close()
                if entry.loss_xxh3 is not None:
                    self._open_cached(
                        name_loss_file(shard), compute_file_size("|u1", entry.tokens), entry.loss_xxh3
                    ).close()
            except (UserError, OSError):
                with self._changing:
                    self._recent = [one for one in self._recent if one != shard]


def _locate_folder(cache: FileCache, url: str) -> Path:
    """Locate the local folder for a store's manifest, tokenizer and plans."""
    return cache.folder / f".{blake2b(url.encode(), digest_size=8).hexdigest()}"


def _copy(remote: Remote, folder: Path, name: str, optional: bool = False) -> bool:
    """Copy a small file to `folder` and return whether it exists; `optional` as in `Remote.read_small_file`."""
    if (content := remote.read_small_file(name, optional)) is None:
        (folder / name).unlink(missing_ok=True)
        return False
    write_whole(folder / name, content, durable=False)
    return True
