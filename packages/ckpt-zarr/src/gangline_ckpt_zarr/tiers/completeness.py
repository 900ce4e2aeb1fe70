"""Whether the files that zarr.json claims are there, by their sizes: nothing is read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

from gangline_ckpt_zarr.format.base import Meta

LOOKED_AT = 200_000  # boxes whose place is worked out; of files beyond that it is enough that they are there


def find_file_error(meta: Meta, sizes: Mapping[str, int]) -> str:
    """What is not as it was written, "" where all is; `sizes`: of what there is, by path in the checkpoint."""
    there, boxes = sum(sizes.values()), 0
    if meta.nbytes > there:
        return f"its arrays have {meta.nbytes:,} bytes, and its files {there:,}"
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
