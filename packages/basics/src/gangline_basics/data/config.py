"""Configuration of the built-in data source. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from gangline.config.ranges import Share
from gangline.config.schema import DataConfig
from gangline.config.values import spell
from gangline.data.vocabulary import find_vocabulary_problems
from gangline.errors import Problem, UserError
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.data.codec import TextCodec

HEADS = 100  # maximum number of files whose beginning a check reads


@dataclass
class TextConfig(DataConfig):
    """Text files, read into memory.

    `path` is a file, a directory, a glob, or a list of such paths; null reads the source code of the Python
    standard library, which is on every machine. Files are plain text or JSON lines (.jsonl, .ndjson), and may be
    compressed (.gz, .bz2, .xz, .zst).
    """

    file_options: ClassVar[tuple[str, ...]] = ("path", "tokenizer")

    path: str | list[str] | None = None  # file, directory, glob or list of paths to read; null: Python's stdlib source
    tokenizer: str | None = None  # path of a tokenizer.json; null: byte-level, one token per byte (vocabulary 256)
    text_field: str = "text"  # JSON field with the text of a document, in each line of a .jsonl file
    binary: bool = False  # permission to read files that do not look like text
    # separator token between files; null: the tokenizer's end-of-text or eos token, or byte 0 without a tokenizer
    separator: str | None = None
    document_masking: bool = False  # document masking: no attention across files or .jsonl lines, positions restart
    # fraction held out for validation: of the files, or of the text if there are few files; 1: all (validation sets)
    validation_fraction: Share = 0.02
    encoding_errors: Literal["replace", "ignore", "strict"] = "replace"  # invalid UTF-8 handling, if tokenizer is set

    def build_codec(self, run: Run) -> TextCodec:
        """Return the codec between text and tokens, without reading the data. Raises UserError."""
        from gangline_basics.data.codec import open_codec

        return open_codec(self.tokenizer, self.separator, self.encoding_errors)

    def export_files(self, run: Run) -> dict[str, bytes]:
        from gangline_basics.data.tokenizer_files import read_tokenizer_files

        return read_tokenizer_files(self.tokenizer, run.model.get_weights_directory()) if self.tokenizer else {}

    def list_notices(self, run: Run) -> list[str]:
        if self.tokenizer is None or self.build_codec(run).separator is not None:
            return []
        return [
            f"data.tokenizer={self.tokenizer} has no known end-of-text token, so files are concatenated without a "
            "separator. To separate files, set data.separator=TOKEN."
        ]

    def check(self, run: Run) -> list[Problem]:
        """Return the problems that the vocabulary and the names, sizes and first bytes of the files show."""
        from gangline_basics.data.compressed import find_compression
        from gangline_basics.data.corpus import list_corpus
        from gangline_basics.data.formats import check_head, is_lines

        problems = []
        if self.validation_fraction == 1 and self is run.data:
            problems.append(
                Problem(
                    "data.validation_fraction=1 leaves no text to train on.",
                    "The option is the share of held-out text; only a validation set may hold out all text.",
                    "Choose 0 <= data.validation_fraction < 1.",
                )
            )
        elif self.validation_fraction == 0 and run.validate.every:
            problems.append(
                Problem(
                    "data.validation_fraction=0 leaves no text to validate on.",
                    f"The run validates every {run.validate.every} steps.",
                    "Set data.validation_fraction=0.02, or turn validation off:  validate.every=null",
                )
            )
        problems += self._check_vocabulary(run)
        try:
            files = list_corpus(self.path)
            for file in files[:: max(1, len(files) // HEADS)] if self.path is not None else ():
                check_head(file.path, self.text_field, self.binary)
        except UserError as error:
            return [*problems, error.to_problem()]
        stored = any(
            find_compression(file.path) or is_lines(file.path) for file in files
        )  # the size of the text differs from the size of the file
        size = sum(file.size for file in files)
        least_size = run.batch.sequence_length + 1
        if self.tokenizer is None and not stored and size < least_size:
            problems.append(
                Problem(
                    f"data.path={spell(self.path)} is too short.",
                    f"The text has {size} bytes, and one sequence of {least_size - 1} tokens needs {least_size} bytes.",
                    "Add text, or reduce batch.sequence_length.",
                )
            )
        return problems

    def _check_vocabulary(self, run: Run) -> list[Problem]:
        try:
            vocab_size = self.build_codec(run).vocab_size
        except UserError as error:
            return [error.to_problem()]
        owner = "bytes" if self.tokenizer is None else f"data.tokenizer={self.tokenizer}"
        return find_vocabulary_problems(
            run.model.vocab_size, vocab_size, owner, f"The vocabulary of the data has {vocab_size} tokens."
        )


PARTS = (
    Part(
        name="text",
        config=TextConfig,
        default=True,
        build="gangline_basics.data.text:build",
        capabilities={"sample": "gangline_basics.sampling.show:show_sample"},
        summary="text files in memory, byte-level or with a tokenizer.json; default: Python's own source",
    ),
)
