"""S3 and compatible stores through s3fs: parallel multipart uploads, and a conditional put for the commit."""

from __future__ import annotations

import contextlib
import secrets
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import fsspec

from gangline.storage.retry import get_http_status
from gangline_ckpt_zarr.stores.base import ObjectWriter, StoreError
from gangline_ckpt_zarr.stores.remote import REQUEST_SECONDS, SIDE_BY_SIDE, RemoteStore

PART_BYTES = 16 << 20  # minimum part size; S3 allows at most 10,000 parts, so large objects have larger parts
MOST_PARTS = 10_000
_STAMP = "gangline-write"  # key, in an object's metadata, of a random id of the write that created the object
_DELETED_AT_ONCE = 1000


class S3Store(RemoteStore):
    """Store on S3. Endpoint and credentials are found as by any AWS tool: ``AWS_ENDPOINT_URL``, ``AWS_PROFILE``, ..."""

    def __init__(
        self, url: str, deadline_seconds: float, request_seconds: float = REQUEST_SECONDS, part_bytes: int = PART_BYTES
    ) -> None:
        user_config = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        config = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 2 * SIDE_BY_SIDE} | user_config
        super().__init__(url, deadline_seconds, request_seconds, config_kwargs=config, skip_instance_cache=True)
        self._fs.retries = 1  # only `retry_request` retries
        self._fs.connect()  # before threads start: each thread would create its own client. Sends no request.
        self._part_bytes = part_bytes
        self._bucket = self._root.partition("/")[0]

    def create(self, path: str, size: int) -> ObjectWriter:
        """Create an object by a multipart upload, or by one put if it is small. Raises FileExistsError, OSError."""
        if self.exists(path):
            raise FileExistsError(f"{self._format_url(path)} exists already")
        return _Multipart(self, path, size, choose_part_bytes(size, self._part_bytes))

    def commit(self, path: str, content: bytes) -> None:
        """Put an object by a conditional put. Raises FileExistsError, OSError."""
        if self.exists(path):  # never overwrite, even if the store ignores the condition
            raise FileExistsError(f"{self._format_url(path)} exists already")
        self.put_new(path, content)

    def put_new(self, path: str, content: bytes | bytearray) -> None:
        """Put an object if none exists at `path`. Raises FileExistsError, OSError."""
        stamp = secrets.token_hex(8)
        put = {"Body": content, "Metadata": {_STAMP: stamp}}
        try:
            self.call("put_object", path, IfNoneMatch="*", **put)
        except OSError as error:
            if get_http_status(error) == 412:
                # If the answer to the first try was lost, the second try finds the object of the first.
                if self.stamp(path) != stamp:
                    raise FileExistsError(f"{self._format_url(path)} exists already") from error
            elif get_http_status(error) == 501:  # a store without conditional puts
                self.call("put_object", path, **put)
            else:
                raise

    def stamp(self, path: str) -> str | None:
        """Return the stamp of the write that created an object; None if there is no object or it has no stamp."""
        try:
            return self.call("head_object", path)["Metadata"].get(_STAMP)
        except FileNotFoundError:
            return None

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """Call one of S3's own operations on an object until it succeeds or the deadline has passed."""
        return self._ask(path, "call_s3", method, Bucket=self._bucket, Key=self.get_key(path), **kwargs)

    def get_key(self, path: str) -> str:
        return self._get_full_path(path).partition("/")[2]

    def delete(self, path: str) -> None:
        super().delete(path)
        self._abort_uploads(path)

    def _remove(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), _DELETED_AT_ONCE):
            keys = [{"Key": self.get_key(path)} for path in paths[first : first + _DELETED_AT_ONCE]]
            arguments = {"Bucket": self._bucket, "Delete": {"Objects": keys, "Quiet": True}}
            refused = self._ask(paths[first], "call_s3", "delete_objects", **arguments).get("Errors")
            if refused:
                raise StoreError(f"s3://{self._bucket}/{refused[0]['Key']} not deleted: {refused[0].get('Message')}")

    def _abort_uploads(self, path: str) -> None:
        """Abort uploads of killed writers, which are invisible but billed. Errors (no permission) are ignored."""
        with contextlib.suppress(OSError):
            arguments = {"Bucket": self._bucket, "Prefix": self.get_key(path)}
            for upload in self._ask(path, "call_s3", "list_multipart_uploads", **arguments).get("Uploads", ()):
                if upload["Key"] == self.get_key(path) or upload["Key"].startswith(self.get_key(path) + "/"):
                    which = {"Bucket": self._bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self._ask(path, "call_s3", "abort_multipart_upload", **which)


def choose_part_bytes(size: int, least: int) -> int:
    """Return the part size of an upload in bytes: `least`, or as many MiB as needed for at most 10,000 equal parts."""
    part_bytes = -(-size // MOST_PARTS)
    return max(least, -(-part_bytes // (1 << 20)) << 20)


class _Multipart(ObjectWriter):
    """Writer of a multipart upload: parts are copied once and sent in parallel; the object is visible after `close`."""

    def __init__(self, store: S3Store, path: str, size: int, part: int) -> None:
        self._store, self._path, self._size, self._part_bytes = store, path, size, part
        self._part = bytearray()
        self._upload: str | None = None
        self._stamp = secrets.token_hex(8)
        self._sent: list[Future[str]] = []
        self._under_way: deque[Future[str]] = deque()
        self._written = 0

    def write(self, content: memoryview) -> None:
        content = content.cast("B") if content.nbytes else content
        self._written += len(content)
        while len(content):
            room = self._part_bytes - len(self._part)
            self._part += content[:room]
            content = content[room:]
            if len(self._part) == self._part_bytes and self._size > self._part_bytes:
                self._send()

    def close(self) -> None:
        if self._written != self._size:
            self.abort()
            raise ValueError(f"{self._path}: {self._written} bytes were written instead of {self._size}")
        if not self._sent:
            self._store.put_new(self._path, self._part)
            return
        if self._part:
            self._send()
        parts = [{"PartNumber": number, "ETag": future.result()} for number, future in enumerate(self._sent, 1)]
        try:
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts})
        except OSError as error:
            # 404, no such upload: if the answer to an earlier try was lost, that try has completed the upload.
            if get_http_status(error) != 404 or self._store.stamp(self._path) != self._stamp:
                raise
        self._upload = None

    def abort(self) -> None:
        for future in self._sent:
            future.cancel()
        for future in self._sent:
            if not future.cancelled():
                future.exception()
        if self._upload is not None:
            with contextlib.suppress(OSError):
                self._call("abort_multipart_upload")
            self._upload = None

    def _send(self) -> None:
        if self._upload is None:
            upload = self._store.call("create_multipart_upload", self._path, Metadata={_STAMP: self._stamp})
            self._upload = upload["UploadId"]
        if len(self._under_way) == SIDE_BY_SIDE:
            self._under_way.popleft().result()
        part, self._part = self._part, bytearray()
        future = self._store._pool.submit(self._put, len(self._sent) + 1, part)
        self._sent.append(future)
        self._under_way.append(future)

    def _put(self, number: int, part: bytearray) -> str:
        return self._call("upload_part", PartNumber=number, Body=part)["ETag"]

    def _call(self, method: str, **kwargs: Any) -> Any:
        return self._store.call(method, self._path, UploadId=self._upload, **kwargs)
