"""Between texts and tokens: prompts, what ends a text, stop strings. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline import plugins
from gangline.data.codec import TextCodec, TokenizerCodec
from gangline.errors import UserError

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.data.vocabulary import Codec


def codec_of(run: Run) -> Codec:
    """The vocabulary of a run's data, without reading the data where its options say enough."""
    return run.data.codec() or plugins.build(run.data, run, "train")


def encode(codec: Codec, prompt: str, run: Run) -> list[int]:
    """The prompt's tokens; of an empty one those of a line's end, so that there is something to go on from.

    Raises UserError where the data is not text, or a token of the prompt is none of the model's.
    """
    tokens = codec.encode(prompt or "\n")
    if tokens is None:
        raise UserError("the data of this run is not text, so there is nothing to sample.")
    if not tokens:
        raise UserError(f"the prompt {prompt!r} has no token in this run's vocabulary.", "Try another --prompt.")
    beyond = max(tokens)
    if beyond >= run.model.vocab_size:
        raise UserError(
            f"the prompt {prompt!r} has token {beyond}, and the model knows {run.model.vocab_size}.",
            "data.tokenizer may have changed since the run.",
        )
    return tokens


def after(codec: Codec, prompt: list[int], written: list[int]) -> str:
    """The text of the tokens written as it follows the prompt's: a tokenizer may drop a space where a text begins."""
    beginning, whole = codec.decode(prompt) or "", codec.decode([*prompt, *written]) or ""
    if whole.startswith(beginning):
        return whole[len(beginning) :]
    return codec.decode(written) or ""


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first of the stop strings."""
    return text[: min([len(text), *(text.find(word) for word in stop if word in text)])]


def ends_of(run: Run, codec: Codec) -> frozenset[int]:
    """Tokens that end a text: what stands between files, and what tokenizer and weights came with name as their end."""
    ends: set[int] = set()
    if isinstance(codec, TextCodec) and codec.separator is not None:
        ends.add(codec.separator)
    if isinstance(codec, TokenizerCodec):
        named = _json(Path(codec.path).expanduser().parent / "tokenizer_config.json").get("eos_token")
        word = named.get("content") if isinstance(named, dict) else named
        token = codec.tokenizer.token_to_id(word) if isinstance(word, str) else None
        ends |= set() if token is None else {token}
    directory = run.model.pretrained()
    if directory is not None:
        said = _json(Path(directory).expanduser() / "generation_config.json").get("eos_token_id")
        ends |= {token for token in (said if isinstance(said, list) else [said]) if isinstance(token, int)}
    return frozenset(ends)


def _json(path: Path) -> dict[str, Any]:
    """Its content, empty where there is no such file. Raises UserError for one that cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    return content if isinstance(content, dict) else {}
