"""Image augmentation: random crops and mirroring, a pure function of (seed, split, sample)."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np


@dataclass(frozen=True)
class Crops:
    """Crops of images (N,): corner and size as fractions of width and height, and whether the image is mirrored.

    corner (N, 2) float32, size (N, 2) float32, both (x, y) in [0, 1]; mirrored (N,) int32
    """

    corner: np.ndarray
    size: np.ndarray
    mirrored: np.ndarray


def draw_crops(numbers: np.ndarray, least: float, flip: bool, *key: object) -> Crops:
    """Draw random crops for samples (N,), as in Szegedy et al., arXiv 1409.4842, section 6.

    A crop is drawn with `least` to 1 of the image's area and 3/4 to 4/3 of its aspect ratio, then clipped to the image;
    with `least` 1 it is the full image. With `flip` a crop is mirrored with probability 0.5. The draws depend on `key`
    and the sample number.
    """
    draws = np.empty((len(numbers), 5))
    for row, number in zip(draws, np.asarray(numbers).tolist(), strict=True):
        digest = blake2b(repr((key, "crop", number)).encode(), digest_size=16).digest()
        row[:] = np.random.Philox(key=np.frombuffer(digest, "<u8")).random_raw(5) / 2.0**64
    area = least + (1 - least) * draws[:, 0]
    ratio = np.exp(np.log(4 / 3) * (2 * draws[:, 1] - 1)) if least < 1 else np.ones(len(draws))
    size = np.minimum(1, np.sqrt(area)[:, None] * np.stack([np.sqrt(ratio), 1 / np.sqrt(ratio)], 1))
    corner = (1 - size) * draws[:, 2:4]
    mirrored = (draws[:, 4] < 0.5) & flip
    return Crops(corner.astype(np.float32), size.astype(np.float32), mirrored.astype(np.int32))
