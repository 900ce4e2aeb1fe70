"""Options of `data=chat`. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gangline import Problem, UserError
from gangline.config import DataConfig, Share
from gangline.data.vocabulary import find_vocabulary_problems

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_basics.data.answers import RenderedChat
    from gangline_basics.data.chat import ChatTemplate
    from gangline_basics.data.codec import TokenizerCodec

RENDERED = 100  # maximum number of rows to render in search of a row that the template accepts


@dataclass
class TemplatedConfig(DataConfig, ABC):
    """Base options of data that is read through a tokenizer and its chat template."""

    file_options: ClassVar[tuple[str, ...]] = ("path", "tokenizer", "template")
    holds: ClassVar[str] = "chats"

    path: str | list[str] | None = None  # .jsonl (may be compressed) or .parquet data: a file, directory, glob or list
    tokenizer: str | None = None  # path of tokenizer.json; null: tokenizer.json in model.weights
    template: str | None = None  # chat template file; null: the template of the tokenizer
    validation_fraction: Share = 0.02  # share of rows held out for validation, evenly spaced; 1: all rows

    def build_codec(self, run: Run) -> TokenizerCodec:
        from gangline_basics.data.codec import TokenizerCodec
        from gangline_finetune.chat.tokenizer import find_tokenizer

        return TokenizerCodec(find_tokenizer(self.tokenizer, run.model.get_weights_directory()), None, "replace")

    def build_chat_template(self, run: Run) -> ChatTemplate:
        from gangline_basics.data.chat import read_template
        from gangline_finetune.chat.tokenizer import find_tokenizer

        return read_template(find_tokenizer(self.tokenizer, run.model.get_weights_directory()), self.template)

    def export_files(self, run: Run) -> dict[str, bytes]:
        from gangline_basics.data.tokenizer_files import read_tokenizer_files
        from gangline_finetune.chat.tokenizer import find_tokenizer

        weights = run.model.get_weights_directory()
        return read_tokenizer_files(find_tokenizer(self.tokenizer, weights), weights, self.template)

    def check(self, run: Run) -> list[Problem]:
        """Return problems of tokenizer, template and rows, without rendering or tokenizing all rows."""
        from gangline_finetune.chat.tokenizer import check_same

        try:
            codec = self.build_codec(run)
            tokenizer = codec.path
            check_same(tokenizer, codec, run.model.get_weights_directory())
            self.check_rows(self.build_chat_template(run))
        except UserError as error:
            return [error.to_problem()]
        why = f"The tokenizer has {codec.vocab_size} tokens; it may belong to another model."
        return find_vocabulary_problems(run.model.vocab_size, codec.vocab_size, f"data.tokenizer={tokenizer}", why)

    def list_notices(self, run: Run) -> list[str]:
        """Return a notice if training starts from random weights, which is probably a mistake in fine-tuning."""
        if run.model.get_weights_directory() or run.job.weights:
            return []
        return ["fine-tuning starts from random weights: neither model.weights nor run.weights is set"]

    def check_rows(self, template: ChatTemplate) -> None:
        """Raise UserError for the first invalid row, and if the template refuses all of the first `RENDERED` rows."""
        from gangline_basics.data.chat import TemplateRefusal
        from gangline_finetune.chat.rows import read_rows

        number, taken, why = 0, False, ""
        for number, (where, row) in enumerate(read_rows(self.path), 1):
            render = self.make_renderer(row, where)
            if taken or number > RENDERED:
                continue
            try:
                render(template)
                taken = True
            except TemplateRefusal as error:
                why = why or f"Error of the template for {where}: {error}"
        if not number:
            raise UserError(
                f"data.path={self.path} holds no {self.holds}.",
                "The files have no rows: write one JSON object per line of a .jsonl file.",
            )
        if not taken:
            amount = f"the first {RENDERED}" if number > RENDERED else "all"
            raise UserError(f"the chat template {template.name} refuses {amount} {self.holds} of data.path.", why)

    @abstractmethod
    def make_renderer(self, row: dict[str, Any], where: str) -> Callable[[ChatTemplate], list[RenderedChat]]:
        """Return a function that renders the chats of a row; it raises TemplateRefusal if the template refuses a chat.

        Raises UserError for an invalid row.
        """


@dataclass
class ChatConfig(TemplatedConfig):
    """Options of `data=chat`: conversations, trained on the assistant's messages and packed into rows.

    All chats are in memory, rendered by the tokenizer's chat template. A row holds complete chats, one after another,
    without attention between chats. A chat longer than a row is truncated at its end.
    """

    field: str = "messages"  # data field with the list of messages, {"role": ..., "content": ...}

    def make_renderer(self, row: dict[str, Any], where: str) -> Callable[[ChatTemplate], list[RenderedChat]]:
        from gangline_basics.data.answers import ASSISTANT, is_trained_on, render_chat
        from gangline_basics.data.chat_rows import parse_messages, parse_tools
        from gangline_finetune.chat.rows import get_field, says

        place = f"data.path: {where}"
        messages, tools = parse_messages(get_field(row, self.field, where), place), parse_tools(row, place)
        if not any(is_trained_on(message) and says(message) for message in messages):
            raise UserError(
                f"{place} has no {ASSISTANT} message to train on.",
                "A chat needs an assistant message that has content and no weight 0.",
            )
        return lambda template: [render_chat(template.bind_tools(tools), messages)]
