"""The options of data=tokens. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gangline.errors import Problem, UserError
from gangline.parts import DataConfig, Part
from gangline.ranges import PositiveInt, ShareBelowOne

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class TokensConfig(DataConfig):
    """A token store, as `gangline data prepare` writes it."""

    file_options: ClassVar[tuple[str, ...]] = ("path",)

    path: str | None = None  # the store's directory
    documents: bool = False  # each document stands alone: no attention across documents, positions start anew
    shuffle_span: PositiveInt | None = None  # tokens that the shuffle reaches over; null: the whole corpus
    order: Literal["shuffled", "text"] = "shuffled"  # text: as data=text visits the same tokens, to compare the two
    validation_fraction: ShareBelowOne = 0.01  # where nothing was held out when it was prepared: of the corpus, its end

    def check(self, run: Run) -> list[Problem]:
        from gangline_dataloader.store.manifest import read

        if not isinstance(self.path, str):
            return [
                Problem(
                    "data=tokens needs data.path.",
                    "It reads a token store, a directory.",
                    "gangline data prepare INPUT --out DIR, then data.path=DIR",
                )
            ]
        try:
            manifest = read(self.path)
        except UserError as error:
            return [error.problem()]
        problems = []
        if manifest.vocab_size > run.model.vocab_size > 0:
            problems.append(
                Problem(
                    f"model.vocab_size={run.model.vocab_size} is too small for data.path={self.path}.",
                    f"Its tokenizer has {manifest.vocab_size} tokens.",
                    f"model.vocab_size={manifest.vocab_size}",
                )
            )
        if manifest.tokens <= run.batch.sequence_length:
            problems.append(
                Problem(
                    f"data.path={self.path} is too short.",
                    f"It has {manifest.tokens} tokens; one sequence needs {run.batch.sequence_length + 1}.",
                    "Give it more text, or a smaller batch.sequence_length.",
                )
            )
        return problems


PARTS = (
    Part(
        name="tokens",
        config=TokensConfig,
        build="gangline_dataloader.sources.build:tokens",
        summary="a corpus prepared by `gangline data prepare`, mapped from disk",
    ),
)
