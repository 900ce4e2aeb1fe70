"""DALI pipeline from encoded images to pixels: decodes only the crop, resizes, mirrors and normalises it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gangline_dataloader.images.augment import Crops

HALF = 127.5  # mean and standard deviation that scale pixels to [-1, 1]
# nvimgcodecStatus_t of nvimgcodec.h: DALI's message has only the number
_STATUS = {2: "invalid parameter", 3: "bad code stream", 4: "unsupported code stream", 5: "no memory"}


class ImageDecoder:
    """CPU decoder of batches of up to `most` images; an image's (side, side) pixels do not depend on its batch."""

    def __init__(self, side: int, most: int) -> None:
        from nvidia.dali import Pipeline, fn, types  # an optional dependency: importing this module must not need it

        to_float, rgb = (getattr(types, name) for name in ("FLOAT", "RGB"))  # DALI defines these names when loaded
        # Only the dynamic executor keeps an output until its last tensor is freed; other executors overwrite it.
        self._pipeline = Pipeline(
            batch_size=most, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True
        )
        with self._pipeline:
            images, corner, size, mirrored = (
                fn.external_source(name=name) for name in ("encoded", "corner", "size", "mirrored")
            )
            cut = fn.decoders.image_slice(
                images, corner, size, device="cpu", output_type=rgb, axis_names="WH", use_fast_idct=False
            )
            resized: Any = fn.resize(cut, size=[side, side])
            pixels = fn.crop_mirror_normalize(
                resized, dtype=to_float, output_layout="CHW", mean=[HALF] * 3, std=[HALF] * 3, mirror=mirrored
            )
            self._pipeline.set_outputs(pixels)
        self._pipeline.build()

    def __call__(self, encoded: Sequence[np.ndarray], crops: Crops) -> torch.Tensor:
        """Decode images (N,) to (N, 3, side, side) float32, valid while the tensor is referenced.

        The tensor is in DALI memory. Raises the RuntimeError of DALI if an image cannot be decoded.
        """
        self._pipeline.feed_input("encoded", list(encoded))
        self._pipeline.feed_input("corner", crops.corner)
        self._pipeline.feed_input("size", crops.size)
        self._pipeline.feed_input("mirrored", crops.mirrored)
        (pixels,) = self._pipeline.run()
        return torch.from_dlpack(pixels.as_tensor())


def extract_reason(error: RuntimeError) -> str:
    """Extract the reason from DALI's message about one image, in one line, without the operator and the traceback."""
    reason = str(error).rpartition("encountered:")[2].partition("Current pipeline object")[0]
    reason = " ".join(re.sub(r"Failed to decode sample #0 :", "", reason).split())
    if code := re.search(r"nvImageCodec failure: '#(\d+)'", reason):
        return f"nvImageCodec failure {code[1]} ({_STATUS.get(int(code[1]), 'internal')})."
    return reason or "DALI reported no reason; stderr may have messages of its decoders."
