"""One document to its tokens: cleaned, what tells who somebody is replaced, rendered where it is a conversation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gangline.data import TokenizerCodec
from gangline_dataloader.prepare import chat
from gangline_dataloader.prepare.clean import cleaned
from gangline_dataloader.prepare.documents import TextDocument
from gangline_dataloader.prepare.language import in_one_of
from gangline_dataloader.prepare.private import replaced
from gangline_dataloader.prepare.rule import Dropped
from gangline_dataloader.prepare.settings import TOKENIZERS, Settings


@dataclass(frozen=True)
class EncodedDocument:
    """A document that passed.

    content   the text, in UTF-8
    tokens    (n,), the end of text included
    counted   (n,) bool: which of them are to be learnt; None: all
    replaced  how often which kind of private words was
    """

    text: str
    content: bytes
    tokens: np.ndarray
    counted: np.ndarray | None = None
    replaced: dict[str, int] = field(default_factory=dict)


class DocumentEncoder:
    """What `gangline data prepare` does to a document.

    engine  what encodes, one of settings.ENGINES; the tokens are the same. Conversations, whose tokens are asked where
            in the text they lie, are encoded by tokenizers
    """

    def __init__(self, settings: Settings, engine: str) -> None:
        self.settings, self.codec = settings, settings.codec(TOKENIZERS if settings.chat else engine)
        self.template = settings.template()
        self._end = np.asarray([] if self.codec.separator is None else [self.codec.separator])
        self._begin = np.asarray([] if settings.begin_of_text is None else [settings.beginning()])

    def __call__(self, document: TextDocument) -> EncodedDocument | Dropped:
        counts: dict[str, int] = {}
        if document.messages is None:
            text = self._cleaned(document.text, counts)
            if isinstance(text, Dropped):
                return text
            content = text.encode()
            tokens = np.concatenate([self._begin, self.codec.encode_file(content, document.name), self._end])
            return EncodedDocument(text, content, tokens, None, counts) if len(tokens) else Dropped("empty")
        assert self.template is not None, "conversations are read where there is a template"
        messages = []
        for message in document.messages:
            text = self._cleaned(message["content"], counts)
            if isinstance(text, Dropped):
                return text
            messages.append({**message, "content": text})
        found = chat.conversation(self.template, messages)
        if isinstance(found, Dropped):
            return found
        tokens, counted = self._with_answers(found)
        return EncodedDocument(found.text, found.text.encode(), tokens, counted, counts)

    def _cleaned(self, text: str, counts: dict[str, int]) -> str | Dropped:
        found = passed(text, self.settings)
        if isinstance(found, Dropped):
            return found
        found, gone = replaced(found, self.settings.private)
        for kind, count in gone.items():
            counts[kind] = counts.get(kind, 0) + count
        return found

    def _with_answers(self, found: chat.Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and which of them hold a letter of an answer. The end of text is not the assistant's."""
        if isinstance(self.codec, TokenizerCodec):
            encoded = self.codec.tokenizer.encode(found.text, add_special_tokens=False)
            ids, places = np.asarray(encoded.ids, np.int64), np.array(encoded.offsets, np.int64).reshape(-1, 2)
            answers = found.answers
        else:
            ids = np.frombuffer(found.text.encode(), np.uint8).astype(np.int64)
            places = np.stack([np.arange(len(ids)), np.arange(len(ids)) + 1], 1)
            answers = tuple(
                (len(found.text[:start].encode()), len(found.text[:stop].encode())) for start, stop in found.answers
            )
        counted = np.zeros(len(ids), bool)
        for start, stop in answers:
            counted |= (places[:, 0] < stop) & (places[:, 1] > start)
        tokens = np.concatenate([ids, self._end]).astype(np.int64)
        return tokens, np.concatenate([counted, np.zeros(len(self._end), bool)])


def passed(text: str, settings: Settings) -> str | Dropped:
    """A document's text, clean and in an asked language, or why it is not kept."""
    found = cleaned(text, settings.clean)
    if isinstance(found, Dropped) or not settings.languages:
        return found
    return in_one_of(found, settings.languages, settings.confidence) or found
