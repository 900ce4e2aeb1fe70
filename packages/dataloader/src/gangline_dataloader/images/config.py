"""Options of data=dali_images, the image-text data source. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Part, Problem, UserError
from gangline.config import DataConfig, PositiveInt, Share, ShareBelowOne
from gangline_dataloader.dali.config import is_installed

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass
class ImagesConfig(DataConfig):
    """Options of data=dali_images: images with texts from WebDataset tar files.

    Texts become byte tokens, pixels are in `Batch.extra["pixels"]`. A sequence begins with `places` placeholder tokens
    for the image, which a model edit replaces by embeddings of the image's patches.
    """

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | None = None  # required: WebDataset tar file or folder of tar files: KEY.jpg (.jpeg, .png), KEY.txt
    side: PositiveInt = 224  # image size: width and height in pixels, after crop and resize
    places: PositiveInt = 16  # number of image tokens: placeholder tokens at the start of each sequence
    # minimum area of the random crop in training, as a fraction of the image area, before the crop is clipped to the
    # image; 1: no crop
    least_area: Share = 0.5
    flip: bool = True  # random horizontal flip of training images, with probability 0.5; false: no flip
    validation_fraction: ShareBelowOne = 0.02  # fraction of the samples held out for validation, at the end of the data

    def check(self, run: Run) -> list[Problem]:
        from gangline.data.vocabulary import find_vocabulary_problems
        from gangline_dataloader.images.webdataset import list_samples

        if not is_installed():
            what = "data=dali_images needs NVIDIA DALI, which is not installed."
            return [Problem(what, "DALI decodes the images.", "pip install 'gangline-dataloader[dali]'")]
        if not isinstance(self.path, str):
            why = "data.path is a WebDataset tar file, or a folder of tar files."
            return [Problem("data=dali_images needs data.path.", why, "data.path=DIR")]
        try:
            list_samples(self.path)
        except UserError as error:
            return [error.to_problem()]
        problems = find_vocabulary_problems(
            run.model.vocab_size, 256, f"data.path={self.path}", "Each byte of a text is a token."
        )
        if self.places >= run.batch.sequence_length:
            what = f"data.places={self.places} leaves no tokens for the text of a sample."
            why = f"A sequence has batch.sequence_length={run.batch.sequence_length} tokens."
            problems.append(Problem(what, why, "Reduce data.places, or increase batch.sequence_length."))
        if not self.least_area:
            problems.append(
                Problem("data.least_area must be above 0.", "A crop of area 0 has no pixels.", "data.least_area=0.5")
            )
        return problems


PARTS = (
    Part(
        name="dali_images",
        config=ImagesConfig,
        build="gangline_dataloader.images.source:ImageSource",
        summary="images with texts (WebDataset), decoded and augmented by NVIDIA DALI",
    ),
)
