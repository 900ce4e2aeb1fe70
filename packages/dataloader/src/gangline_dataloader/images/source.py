"""The data source of `data=dali_images`: sequences of image placeholder tokens, then text; pixels are a separate array.

T tokens of a sequence; the first P = `places` tokens are the placeholders of an image of (side, side) pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from gangline import UserError
from gangline.data.base import DataSource
from gangline.data.reader import BatchReader, ReadPlace
from gangline.data.sample import Sample
from gangline_dataloader.images.augment import Crops, draw_crops
from gangline_dataloader.images.structure import describe_beginning, find_damage
from gangline_dataloader.images.webdataset import ImageTexts, list_samples
from gangline_dataloader.order.mixture import Ingredient
from gangline_dataloader.order.single import SingleOrder

if TYPE_CHECKING:
    from torch import Tensor

    from gangline.config import Run
    from gangline.data.base import Split
    from gangline_dataloader.images.config import ImagesConfig
    from gangline_dataloader.images.decode import ImageDecoder

END = 0  # token after a text, also the placeholder token of an image


class ImageSource(DataSource):
    """Data source of images with texts. Raises UserError if the split has no samples. `sample` returns:

    pixels     (3, side, side) float32 in [-1, 1]
    tokens     P placeholders of the image, the bytes of the text, then end tokens up to T + 1. A text longer than T - P
               bytes is truncated to T + 1 - P bytes, without an end token
    loss_mask  true for targets in the text and for the first end token
    """

    def __init__(self, config: ImagesConfig, run: Run, split: Split) -> None:
        self.config, self.split, self.seed, self.T = config, split, run.seed, run.batch.sequence_length
        self.files: ImageTexts = list_samples(config.path or "")
        self._identity = self.files.compute_identity()
        count = len(self.files)
        held_out = max(1, round(count * config.validation_fraction)) if config.validation_fraction else 0
        self.first, self.count = (count - held_out, held_out) if split == "validation" else (0, count - held_out)
        if self.count < 1:
            raise UserError(
                f"data.path={config.path} has no samples for {split}.", f"The data has {count} samples in total."
            )
        self.order = SingleOrder(Ingredient("images", self.count), run.seed, split)
        self._lock = Lock()

    @cached_property
    def _decoder(self) -> ImageDecoder:
        from gangline_dataloader.images.decode import ImageDecoder

        return ImageDecoder(self.config.side, 1)

    def sample(self, i: int) -> Sample:
        image, tokens, mask = self.read_encoded(i)
        with self._lock:
            pixels = self.decode_pixels(self._decoder, [i], [image])[0].numpy().copy()
        sample: dict[str, Any] = {"tokens": tokens, "loss_mask": mask, "pixels": pixels}
        return sample  # type: ignore[return-value]

    def read_encoded(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (encoded image (n,) uint8, tokens (T+1,) uint8, loss mask (T,) bool) of sample `i`.

        Raises UserError with the image's name if the image file is damaged, which might be decoded to wrong pixels.
        """
        image, text = self.files.read(self._find_row(i))
        if why := find_damage(image):
            raise self._explain_damage(i, why)
        places = self.config.places
        words = np.frombuffer(text[: self.T + 1 - places], np.uint8)
        tokens, mask = np.full(self.T + 1, END, np.uint8), np.zeros(self.T, bool)
        tokens[places : places + len(words)] = words
        mask[places - 1 : places + len(words)] = True
        return np.frombuffer(image, np.uint8), tokens, mask

    def decode_pixels(self, decoder: ImageDecoder, numbers: Sequence[int], images: Sequence[np.ndarray]) -> Tensor:
        """Decode the images of samples (N,) to (N, 3, side, side). Raises UserError with the name of a broken image."""
        from gangline_dataloader.images.decode import extract_reason

        try:
            return decoder(images, self.choose_crops(np.asarray(numbers, np.int64)))
        except RuntimeError as error:  # DALI does not say which image is broken: decode the images one by one
            for number, image in zip(numbers, images, strict=True):
                try:
                    type(decoder)(self.config.side, 1)([image], self.choose_crops(np.array([number])))
                except RuntimeError as alone:
                    why = f"{extract_reason(alone)} {describe_beginning(image.tobytes())}".strip()
                    raise self._explain_damage(number, why) from error
            raise

    def _explain_damage(self, number: int, why: str) -> UserError:
        row = self._find_row(number)
        path, at = self.files.files[int(self.files.file[row])], int(self.files.image[row, 0])
        return UserError(
            f"{path}: {self.files.find_image_name(row)} (sample {number}, at byte {at}) cannot be decoded.",
            why,
            "Restore the image, or write the tar file again without this sample.",
        )

    def _find_row(self, number: int) -> int:
        return int(self.order(np.array([number])).row[0]) + self.first

    def choose_crops(self, numbers: np.ndarray) -> Crops:
        """Draw the crops of samples (N,); images of the validation split stay complete and unmirrored."""
        training = self.split == "train"
        least, flip = (self.config.least_area, self.config.flip) if training else (1.0, False)
        return draw_crops(numbers, least, flip, self.seed, self.split)

    def open_reader(self, place: ReadPlace) -> BatchReader:
        from gangline_dataloader.images.reader import ImageReader

        return ImageReader(self, place)

    def count_samples(self) -> int:
        return self.count

    def compute_fingerprint(self) -> str:
        about = self.config
        options = (about.side, about.places, about.least_area, about.flip)
        deciding = (self._identity, self.first, self.count, self.seed, self.split, self.T, options)
        return blake2b(repr(deciding).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        room = self.T + 1 - self.config.places
        long = int((self.files.text[self.first : self.first + self.count, 1] >= room).sum())
        note = f"; {long} text{'s' * (long > 1)} truncated at {room} bytes" if long else ""
        return f"{self.count} images with texts, {self.config.side} x {self.config.side} pixels{note}"

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).replace(b"\0", b"").decode(errors="replace")
