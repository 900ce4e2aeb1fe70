"""Tokenizer and chat template of token stores, and notices about stores of older rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import UserError
from gangline_basics.data.chat import ChatTemplate, read_template
from gangline_basics.data.chat_tokens import LOSS_MASK_RULE
from gangline_basics.data.codec import ByteCodec, TextCodec, TokenizerCodec
from gangline_dataloader.store.external import is_external
from gangline_dataloader.store.local import LocalTokens
from gangline_dataloader.store.manifest import TEMPLATE, VALIDATION
from gangline_dataloader.store.remote.tokens import RemoteTokens, is_remote
from gangline_dataloader.store.stored import StoreTokens
from gangline_dataloader.store.tokens import Tokens

if TYPE_CHECKING:
    from gangline_dataloader.config import SequenceConfig


def open_codec(store: Tokens) -> TextCodec | None:
    """Open the text codec of a store; None for external formats. Raises UserError if the tokenizer file was changed."""
    if not isinstance(store, StoreTokens):
        return None
    about = store.manifest.tokenizer
    if about.file is None:
        return ByteCodec(chr(about.end_of_text or 0))
    codec = TokenizerCodec(str(store.folder / about.file), None, "replace")
    if codec.identity != about.identity:
        raise UserError(
            f"{store.folder / about.file} is not the tokenizer of the tokens in {store.name}.",
            f"The file has identity {codec.identity}, and the manifest records {about.identity}.",
            f"Copy the file again; to check the store:  gangline data verify {store.name}",
        )
    codec.separator = about.end_of_text
    return codec


def open_stores(config: SequenceConfig) -> list[StoreTokens]:
    """Open the token stores that options name, without external formats. Raises UserError for a damaged store."""
    cache = config.make_remote_cache()
    stores: list[StoreTokens] = []
    for path in config.list_paths():
        if is_remote(path):
            stores.append(RemoteTokens(path, cache.open_file_cache(), cache.deadline))
        elif not is_external(Path(path).expanduser()):
            stores.append(LocalTokens(path))
    return stores


def find_chat_template(stores: Sequence[StoreTokens]) -> ChatTemplate | None:
    """Find the chat template of the stores with conversations, else of the first store's tokenizer; None: no store.

    Raises UserError if a store has no template, or the templates of stores differ.
    """
    templates: list[tuple[str, ChatTemplate]] = []
    for store in [store for store in stores if store.masked] or stores[:1]:
        about, own = store.manifest.tokenizer, store.folder / TEMPLATE
        if about.file is None and not own.exists():
            raise _explain_no_template(store)
        try:
            tokenizer = None if about.file is None else str(store.folder / about.file)
            templates.append((store.name, read_template(tokenizer, str(own) if own.exists() else None)))
        except UserError as error:
            raise _explain_no_template(store) from error
    for name, other in templates[1:]:
        first, template = templates[0]
        if (template.source, template.special) != (other.source, other.special):
            raise UserError(
                f"the conversations of {first} and {name} were rendered by different chat templates.",
                "A model is sampled and exported with one chat template.",
                "Prepare both stores again with the same --tokenizer and --chat-template.",
            )
    return templates[0][1] if templates else None


def report_old_masks(stores: Sequence[StoreTokens]) -> list[str]:
    """Return a notice for each store whose loss mask over conversations follows an older rule."""
    return [
        f"{store.name} was prepared by an older rule for loss masks of conversations: other tokens than the answers "
        "may contribute to the loss. To apply the current rule, prepare the store again."
        for store in stores
        if store.masked and store.manifest.loss_mask_rule != LOSS_MASK_RULE
    ]


def report_glued_texts(stores: Sequence[StoreTokens]) -> list[str]:
    """Return a notice for each store without an end-of-text token."""
    return [
        f"{store.name} has no end-of-text token: documents follow each other without a separator. To add the token, "
        "prepare the store again with --end-of-text TOKEN."
        for store in stores
        if store.end_of_text is None
    ]


def report_unused_fraction(stores: Sequence[StoreTokens], share: float, default: float) -> list[str]:
    """Return a notice for each store whose validation part is used instead of the validation fraction `share`."""
    return [
        f"data.validation_fraction={share:g} has no effect on {store.name}: the validation split is the folder "
        f"{store.name}/{VALIDATION}, which `gangline data prepare` held out."
        for store in stores
        if store.manifest.held_out and share not in (default, 1)
    ]


def _explain_no_template(store: StoreTokens) -> UserError:
    why = f"The file {TEMPLATE} is missing, and the store's tokenizer has no chat template."
    if store.masked:
        why = "The store was prepared by an older version, which did not store the chat template."
    return UserError(f"{store.name} has no chat template.", why, f"Copy the chat template to {store.name}/{TEMPLATE}.")
