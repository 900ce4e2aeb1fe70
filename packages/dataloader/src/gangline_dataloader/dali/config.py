"""Options of data=dali, the NVIDIA DALI reader of token stores. Torch-free."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Part, Problem
from gangline.config import PositiveInt
from gangline_dataloader.config import CACHE, TokensConfig

if TYPE_CHECKING:
    from gangline.config import Run


def is_installed() -> bool:
    """Return whether NVIDIA DALI is installed, without importing it."""
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.dali") is not None


@dataclass
class DaliConfig(TokensConfig):
    """Options of data=dali: a token store read through NVIDIA DALI, with the samples and order of data=tokens.

    On a GPU, tokens are prefetched in their stored width on a CUDA stream of DALI. On a CPU, data=dali is a little
    slower than data=tokens (the README has numbers); it exists so that the pipeline can be tested without a GPU.
    """

    layout_options: ClassVar[tuple[str, ...]] = ("prefetch", *CACHE)

    # prefetch depth of DALI in chunks; a chunk is one step, or several steps with at most 4.2 million tokens per rank
    prefetch: PositiveInt = 2

    def check(self, run: Run) -> list[Problem]:
        if not is_installed():
            what = "data=dali needs NVIDIA DALI, which is not installed."
            why = "DALI is an extra of gangline-dataloader, about 0.5 GB on disk, and also runs without a GPU."
            return [Problem(what, why, "pip install 'gangline-dataloader[dali]'   or   data=tokens")]
        return super().check(run)


PARTS = (
    Part(
        name="dali",
        config=DaliConfig,
        build="gangline_dataloader.dali.source:build_dali",
        summary="data=tokens read through NVIDIA DALI, prefetched to the GPU on a separate CUDA stream",
    ),
)
