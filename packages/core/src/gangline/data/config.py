"""The built-in data source's configuration. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gangline.errors import Problem, UserError
from gangline.parts import DataConfig, Part
from gangline.ranges import Share

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.data.codec import Codec


@dataclass
class Text(DataConfig):
    """Text files, read into memory.

    `path` is a file, a directory, a glob, or a list of these; null is the Python standard library's own source, which
    every machine with Python has.
    """

    file_options: ClassVar[tuple[str, ...]] = ("path", "tokenizer")

    path: str | list[str] | None = None  # a file, a directory, a glob or a list of these; null: Python's own source
    tokenizer: str | None = None  # a tokenizer.json; null: one token for each byte, vocabulary 256
    separator: str | None = None  # the token between files; null: the tokenizer's own end of text, or byte 0
    documents: bool = False  # each file stands alone: no attention across files, positions start anew
    validation_fraction: Share = 0.02  # of the files (of one file: its end) is held out; 1, of a validation set: all
    encoding_errors: Literal["replace", "ignore", "strict"] = "replace"  # of text that is not UTF-8, with a tokenizer

    def codec(self) -> Codec:
        """Text to tokens and back, without reading the data. Raises UserError."""
        from gangline.data.codec import open_codec

        return open_codec(self)

    def check(self, run: Run) -> list[Problem]:
        """Everything that names and sizes of files can tell; nothing is read but a tokenizer."""
        from gangline.data.corpus import listing

        problems = []
        if self.validation_fraction == 1 and self is run.data:
            problems.append(
                Problem(
                    "data.validation_fraction=1 leaves no text to train on.",
                    "It says which part of the text is held out; all of it may be, of a validation set.",
                    "Choose 0 <= data.validation_fraction < 1.",
                )
            )
        elif self.validation_fraction == 0 and run.validate.every:
            problems.append(
                Problem(
                    "data.validation_fraction=0 leaves no text to validate on.",
                    f"The run validates every {run.validate.every} steps.",
                    "validate.every=null turns that off.",
                )
            )
        problems += self._check_vocabulary(run)
        try:
            size = sum(file.size for file in listing(self.path))
        except UserError as error:
            return [*problems, error.problem()]
        needed = run.batch.sequence_length + 1
        if self.tokenizer is None and size < needed:
            problems.append(
                Problem(
                    f"data.path={self.path} is too short.",
                    f"It has {size} bytes, and one sequence of {needed - 1} tokens needs {needed}.",
                    "Give it more text, or a smaller batch.sequence_length.",
                )
            )
        return problems

    def _check_vocabulary(self, run: Run) -> list[Problem]:
        try:
            needed = self.codec().vocab_size
        except UserError as error:
            return [error.problem()]
        if needed <= run.model.vocab_size:
            return []
        whose = "bytes" if self.tokenizer is None else f"data.tokenizer={self.tokenizer}"
        return [
            Problem(
                f"model.vocab_size={run.model.vocab_size} is too small for {whose}.",
                f"The data has {needed} different tokens.",
                f"model.vocab_size={needed}",
            )
        ]


PARTS = (
    Part(
        name="text",
        config=Text,
        build="gangline.data.text:build",
        summary="text files in memory, as bytes or through a tokenizer.json; by default Python's own source",
    ),
)
