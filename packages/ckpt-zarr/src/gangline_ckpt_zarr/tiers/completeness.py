"""Completeness of a checkpoint: whether all files of zarr.json exist and have the right sizes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from gangline_ckpt_zarr.format.base import Meta

# maximum number of chunk runs checked for file size; files beyond this limit are only checked for existence
LOOKED_AT = 200_000


def find_file_error(meta: Meta, sizes: Mapping[str, int]) -> str:
    """Return which file is missing or has a wrong size, "" if none; `sizes`: bytes of each existing file, by path."""
    there, boxes = sum(sizes.values()), 0
    if meta.nbytes > there:
        return f"the arrays need {meta.nbytes:,} bytes, but the files have only {there:,}"
    for rank in meta.iterate_writers():
        path = meta.get_file_path(rank)
        if path not in sizes:
            return f"{path} is missing"
        if boxes < LOOKED_AT:
            file = meta.files.get_rank_file(rank)
            boxes += len(file.runs)
            if why := file.find_size_error(sizes[path]):
                return f"{path} {why}"
    return ""
