"""zarr data types that store the dtypes of torch. Torch-free."""

from __future__ import annotations

# Types that stock zarr readers know by name are stored as they are. Others are widened, exactly, to float32: every
# reader then shows the right values, and training state rarely holds such types (weights are kept as float32 masters).
SIZES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
# torch names of the dtypes that are widened to float32.
WIDENED = {"bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"}


def map_dtype(dtype: str) -> str:
    """Return the zarr data type that stores an array of torch's `dtype`. Raises ValueError if there is none."""
    if dtype in SIZES:
        return dtype
    if dtype in WIDENED:
        return "float32"
    raise ValueError(f"checkpoint=zarr does not support dtype {dtype!r}")


def count_itemsize(dtype: str) -> int:
    """Return the bytes of one stored element of an array of torch's `dtype`."""
    return SIZES[map_dtype(dtype)]
