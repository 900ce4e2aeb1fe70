"""Object stores by URL: local paths, and anything fsspec opens."""

from __future__ import annotations

import os

from gangline import UserError
from gangline_ckpt_zarr.stores.base import ObjectStore
from gangline_ckpt_zarr.stores.local import LocalStore

DEADLINE_SECONDS = 600.0


def open_store(url: str, *, deadline_seconds: float = DEADLINE_SECONDS) -> ObjectStore:
    """Open the store at a URL: a LocalStore for a path or ``file://``, else a store of fsspec (``s3://``, ``gs://``).

    Raises UserError if a driver is missing or the scheme is unknown.

    A remote store retries each request for at most `deadline_seconds`. Endpoint and credentials come from the usual
    environment variables of the store and from fsspec's own configuration files.
    """
    for scheme in ("file://", "local://"):
        if url.startswith(scheme):
            return LocalStore(url.removeprefix(scheme))
    if "://" not in url:
        return LocalStore(os.path.expanduser(url))
    import fsspec
    from fsspec.registry import known_implementations

    from gangline_ckpt_zarr.stores.remote import FsspecStore
    from gangline_ckpt_zarr.stores.s3 import S3Store

    scheme = url.partition("://")[0]
    try:
        if fsspec.get_filesystem_class(scheme).__module__.startswith("s3fs"):
            return S3Store(url, deadline_seconds)
        return FsspecStore(url, deadline_seconds)
    except ImportError as error:
        driver = known_implementations.get(scheme, {}).get("class", "").partition(".")[0]
        raise UserError(
            f"the driver of {scheme}:// cannot be imported.",
            str(error) if driver in ("", "fsspec") else f"Install {driver}:  pip install {driver}",
        ) from error
    except ValueError as error:
        raise UserError(
            f"{scheme}:// is not a known kind of store.",
            f"{error}",
            "Choices: a path, file://, s3://, gs://, or another scheme that fsspec opens.",
        ) from error
