"""The options of `data=chat`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem, UserError
from gangline.config import DataConfig, Share
from gangline.data import vocabulary_problems

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.data import TokenizerCodec


@dataclass
class TemplatedConfig(DataConfig):
    """What is read through a tokenizer and its chat template."""

    file_options: ClassVar[tuple[str, ...]] = ("path", "tokenizer", "template")

    path: str | list[str] | None = None  # .jsonl (compressed too) or .parquet: a file, a directory, a glob or a list
    tokenizer: str | None = None  # a tokenizer.json; null: the one beside model.weights
    template: str | None = None  # a file with a chat template; null: the tokenizer's own
    validation_fraction: Share = 0.02  # of the rows is held out, evenly spread; 1, of a validation set: all

    def codec(self) -> TokenizerCodec | None:
        from gangline.data import TokenizerCodec

        return None if self.tokenizer is None else TokenizerCodec(self.tokenizer, None, "replace")

    def exported(self, run: Run) -> dict[str, bytes]:
        from gangline.tools import tokenizer_files
        from gangline_finetune.chat.encode import tokenizer_of

        weights = run.model.pretrained()
        return tokenizer_files(tokenizer_of(self.tokenizer, weights), weights, self.template)

    def check(self, run: Run) -> list[Problem]:
        """The tokenizer, its template, and every row: all but what rendering and tokenizing come to."""
        from gangline.data import TokenizerCodec, template_of
        from gangline_finetune.chat.encode import check_same, tokenizer_of

        try:
            tokenizer = tokenizer_of(self.tokenizer, run.model.pretrained())
            codec = TokenizerCodec(tokenizer, None, "replace")
            check_same(tokenizer, codec, run.model.pretrained())
            template_of(tokenizer, self.template)
            self.check_rows()
        except UserError as error:
            return [error.problem()]
        why = f"It has {codec.vocab_size} tokens: it is another model's."
        return vocabulary_problems(run.model.vocab_size, codec.vocab_size, f"data.tokenizer={tokenizer}", why)

    def check_rows(self) -> None:
        """Raises UserError for the first row that is not what it has to be."""


@dataclass
class ChatConfig(TemplatedConfig):
    """Conversations, of which what the assistant says is learnt. They are read into memory, and packed into rows.

    A chat is rendered by the chat template of the tokenizer. Rows hold whole chats, one behind another, of which none
    sees another; a chat that is longer than a row is cut at its end.
    """

    field: str = "messages"  # of a row: its list of {"role": ..., "content": ...}

    def check_rows(self) -> None:
        from gangline.data import messages_of
        from gangline_finetune.chat.rows import field_of, rows
        from gangline_finetune.chat.template import ROLE

        empty = True
        for where, row in rows(self.path):
            messages = messages_of(field_of(row, self.field, where), f"data.path: {where}")
            if not any(message["role"] == ROLE and message["content"].strip() for message in messages):
                raise UserError(f"data.path: {where} has nothing that an {ROLE} says.", "There is nothing to learn.")
            empty = False
        if empty:
            raise UserError(f"data.path={self.path} holds no chats.", "Every line of a .jsonl is one.")
