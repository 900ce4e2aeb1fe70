"""The data source of `data=dali`: the samples of `data=tokens`, read through NVIDIA DALI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline_dataloader.sources.build import build_tokens
from gangline_dataloader.sources.windows import WindowSource

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.data.base import Split
    from gangline.data.reader import BatchReader, ReadPlace
    from gangline_dataloader.dali.config import DaliConfig


def build_dali(config: DaliConfig, run: Run, split: Split) -> WindowSource:
    """Build the source of `data=tokens` with a DALI reader. Raises UserError like `build_tokens`."""

    def make_reader(source: WindowSource, place: ReadPlace) -> BatchReader:
        from gangline_dataloader.dali.reader import DaliReader

        return DaliReader(source, place, config.prefetch)

    return build_tokens(config, run, split, make_reader)
