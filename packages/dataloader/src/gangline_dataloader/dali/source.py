"""`data=dali`: the samples of `data=tokens`, brought by DALI."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline_dataloader.sources.build import tokens
from gangline_dataloader.sources.windows import WindowSource

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.data.base import Split
    from gangline.data.reader import BatchReader, ReadPlace
    from gangline_dataloader.dali.config import DaliConfig


def dali(config: DaliConfig, run: Run, split: Split) -> WindowSource:
    """The source of `data=tokens` with another reader. Raises UserError as that does."""

    def reader(source: WindowSource, place: ReadPlace) -> BatchReader:
        from gangline_dataloader.dali.reader import DaliReader

        return DaliReader(source, place, config.prefetch)

    return tokens(config, run, split, reader)
