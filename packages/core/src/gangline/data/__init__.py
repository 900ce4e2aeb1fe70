"""What a run reads: what a data source imports. Torch-free but for the readers of whole batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.data.answers import (
        ASSISTANT as ASSISTANT,
        HALF_CHARACTER as HALF_CHARACTER,
        AnswerSpan as AnswerSpan,
        Messages as Messages,
        RenderedChat as RenderedChat,
        is_trained_on as is_trained_on,
        render_chat as render_chat,
    )
    from gangline.data.base import (
        DataSource as DataSource,
        FirstModel as FirstModel,
        Sample as Sample,
        Split as Split,
    )
    from gangline.data.chat import (
        ChatTemplate as ChatTemplate,
        TemplateRefusal as TemplateRefusal,
        template_of as template_of,
    )
    from gangline.data.chat_rows import (
        messages_of as messages_of,
        tools_of as tools_of,
        without_nulls as without_nulls,
    )
    from gangline.data.chat_tokens import (
        LEARNT_RULE as LEARNT_RULE,
        ChatEncoder as ChatEncoder,
        MaskedTokens as MaskedTokens,
    )
    from gangline.data.codec import (
        ByteCodec as ByteCodec,
        TextCodec as TextCodec,
        TokenizerCodec as TokenizerCodec,
        open_codec as open_codec,
    )
    from gangline.data.compressed import COMPRESSED as COMPRESSED, decompressed as decompressed
    from gangline.data.corpus import FilePart as FilePart, TextFile as TextFile, listing as listing, split as split
    from gangline.data.formats import (
        binary_bytes as binary_bytes,
        has_half_character as has_half_character,
        replace_invalid as replace_invalid,
        utf8_bytes as utf8_bytes,
    )
    from gangline.data.named_tokens import special_tokens as special_tokens
    from gangline.data.read_ahead import ReadAhead as ReadAhead
    from gangline.data.reader import BatchReader as BatchReader, ReadPlace as ReadPlace, StoredBatch as StoredBatch
    from gangline.data.sample_reader import KeptMemory as KeptMemory, use_device as use_device
    from gangline.data.vocabulary import Codec as Codec, vocabulary_problems as vocabulary_problems

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.data.answers": "ASSISTANT AnswerSpan HALF_CHARACTER Messages RenderedChat is_trained_on render_chat",
        "gangline.data.base": "DataSource FirstModel Sample Split",
        "gangline.data.chat": "ChatTemplate TemplateRefusal template_of",
        "gangline.data.chat_rows": "messages_of tools_of without_nulls",
        "gangline.data.chat_tokens": "ChatEncoder LEARNT_RULE MaskedTokens",
        "gangline.data.codec": "ByteCodec TextCodec TokenizerCodec open_codec",
        "gangline.data.compressed": "COMPRESSED decompressed",
        "gangline.data.corpus": "FilePart TextFile listing split",
        "gangline.data.formats": "binary_bytes has_half_character replace_invalid utf8_bytes",
        "gangline.data.read_ahead": "ReadAhead",
        "gangline.data.reader": "BatchReader ReadPlace StoredBatch",
        "gangline.data.sample_reader": "KeptMemory use_device",
        "gangline.data.named_tokens": "special_tokens",
        "gangline.data.vocabulary": "Codec vocabulary_problems",
    },
)
