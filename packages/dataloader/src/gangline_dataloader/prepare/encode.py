"""Encoding of one document to tokens: cleaned, filtered by language, personal data replaced, conversations rendered."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gangline_basics.data.answers import HALF_CHARACTER, render_chat
from gangline_basics.data.chat import TemplateRefusal
from gangline_basics.data.chat_tokens import ChatEncoder
from gangline_basics.data.formats import has_half_character
from gangline_dataloader.prepare.clean import clean_text
from gangline_dataloader.prepare.documents import TextDocument
from gangline_dataloader.prepare.language import check_language
from gangline_dataloader.prepare.private import replace_private
from gangline_dataloader.prepare.rule import Dropped
from gangline_dataloader.prepare.settings import TOKENIZERS, Settings

NOT_UTF8 = "bytes that are not UTF-8"  # name in the report of the number of U+FFFD that replace such bytes


@dataclass(frozen=True)
class EncodedDocument:
    """A document that passed all rules, with its tokens.

    content   `text` in UTF-8
    tokens    (n,) token ids, with begin and end of text
    counted   (n,) bool loss mask: tokens that are trained on; None: all tokens
    replaced  kind of replaced text (personal data, invalid UTF-8) -> number of replacements
    """

    text: str
    content: bytes
    tokens: np.ndarray
    counted: np.ndarray | None = None
    replaced: dict[str, int] = field(default_factory=dict)


class DocumentEncoder:
    """Callable that cleans and encodes a document, or returns why it is dropped.

    engine  tokeniser library, one of settings.ENGINES, without effect on the tokens. Conversations are always encoded
            by tokenizers, because the loss mask needs the position of each token in the text
    """

    def __init__(self, settings: Settings, engine: str) -> None:
        self.settings, self.codec = settings, settings.open_codec(TOKENIZERS if settings.chat else engine)
        self._of_message = replace(settings, clean=tuple(rule for rule in settings.clean if rule != "length"))
        template = settings.load_template()
        self._chats = None if template is None else ChatEncoder(self.codec, template)
        self._end = np.asarray([] if self.codec.separator is None else [self.codec.separator])
        self._begin = np.asarray([] if settings.begin_of_text is None else [settings.find_begin_token()])

    def __call__(self, document: TextDocument) -> EncodedDocument | Dropped:
        counts: dict[str, int] = {}
        if document.absent:
            return Dropped("no text")
        if document.messages is None:
            if document.invalid:
                counts[NOT_UTF8] = document.invalid
            text = self._clean(document.text, counts)
            if isinstance(text, Dropped):
                return text
            content = text.encode()
            tokens = np.concatenate([self._begin, self.codec.encode_file(content, document.name), self._end])
            return EncodedDocument(text, content, tokens, None, counts) if len(tokens) else Dropped("empty")
        if any(has_half_character(message["content"]) for message in document.messages):  # before --clean removes it
            return Dropped(f"chat: {HALF_CHARACTER}")
        messages = []
        for message in document.messages:  # a message may be empty: a tool call, a system turn
            words = message["content"]
            outcome = filter_text(words, self._of_message) if words.strip() else words
            if isinstance(outcome, Dropped):
                return outcome
            messages.append({**message, "content": outcome})
        if "length" in self.settings.clean and not any(message["content"].strip() for message in messages):
            return Dropped("empty")
        tools = self._replace_private(document.tools, counts)
        return self._encode_conversation(self._replace_private(messages, counts), tools, counts)

    def _clean(self, text: str, counts: dict[str, int]) -> str | Dropped:
        outcome = filter_text(text, self.settings)
        return outcome if isinstance(outcome, Dropped) else str(self._replace_private(outcome, counts))

    def _replace_private(self, value: Any, counts: dict[str, int]) -> Any:
        """Replace personal data in a text, or in all texts of lists and objects: a template may render any field."""
        if isinstance(value, list):
            return [self._replace_private(one, counts) for one in value]
        if isinstance(value, dict):
            return {
                self._replace_private(name, counts): self._replace_private(one, counts) for name, one in value.items()
            }
        if not isinstance(value, str):
            return value
        text, replacements = replace_private(value, self.settings.private)
        for kind, count in replacements.items():
            counts[kind] = counts.get(kind, 0) + count
        return text

    def _encode_conversation(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, counts: dict[str, int]
    ) -> EncodedDocument | Dropped:
        """Encode a conversation with a loss mask of the assistant's tokens; the end of text is not trained on."""
        assert self._chats is not None, "conversations are rendered by a chat template"
        try:
            chat = render_chat(self._chats.template.bind_tools(tools), messages)
        except TemplateRefusal as error:
            return Dropped(f"chat: {error}"[:80])
        if not chat.answers:
            return Dropped("chat: no answer")
        (masked,) = self._chats([chat])
        if not masked.loss_mask.any():
            return Dropped("chat: nothing to learn")
        tokens = np.concatenate([masked.tokens.astype(np.int64), self._end.astype(np.int64)])
        loss_mask = np.concatenate([masked.loss_mask, np.zeros(len(self._end), bool)])
        return EncodedDocument(chat.text, chat.text.encode(), tokens, loss_mask, counts)


def filter_text(text: str, settings: Settings) -> str | Dropped:
    """Clean a text and check its language; return the cleaned text, or why it is dropped."""
    outcome = clean_text(text, settings.clean)
    if isinstance(outcome, Dropped) or not settings.languages:
        return outcome
    return check_language(outcome, settings.languages, settings.confidence) or outcome
