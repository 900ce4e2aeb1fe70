"""Files exported next to the weights for inference: tokenizer, chat template, generation config. Torch-free."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline_basics.data.named_tokens import CONFIG, GENERATION, MAP, map_words, read_generation_config

# File names that transformers writes; a tokenizer has some of these files.
TOKENIZER = (
    "tokenizer.json",
    CONFIG,
    MAP,
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
TEMPLATE = "chat_template.jinja"


def read_tokenizer_files(tokenizer: str | None, weights: str | None, template: str | None = None) -> dict[str, bytes]:
    """Return name -> content of the files that are exported with a model's weights.

    tokenizer  path of a tokenizer.json, read with the files next to it; None: the data has no tokenizer
    weights    directory of the initial weights; its generation config is copied, with the tokenizer's eos_token added
    template   file of a chat template that replaces the tokenizer's

    Raises UserError if a file cannot be read.
    """
    contents: dict[str, bytes] = {}
    try:
        if tokenizer is not None:
            path = Path(tokenizer).expanduser()
            files = {name: find_file(path.parent, name) for name in TOKENIZER if name != "tokenizer.json"}
            contents = {name: file.read_bytes() for name, file in files.items() if file is not None}
            contents["tokenizer.json"] = path.read_bytes()
        if template is not None:
            contents[TEMPLATE] = Path(template).expanduser().read_bytes()
        generation = {} if weights is None else _read_generation(Path(weights).expanduser())
        for name, token in _map_tokens(contents).items():
            before = generation.get(name)
            ends = before if isinstance(before, list) else [] if before is None else [before]
            if name == "eos_token_id" and ends and token not in ends:
                generation[name] = [*ends, token]  # either token ends a text
            generation.setdefault(name, token)
        if generation:
            contents[GENERATION] = (json.dumps(generation, indent=2) + "\n").encode()
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("a file of the tokenizer cannot be read.", str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:  # JSON of an unexpected structure
        raise UserError(
            f"a file next to {tokenizer or weights} has an unexpected structure.", f"{type(error).__name__}: {error}"
        ) from error
    return contents


def find_file(directory: Path, name: str) -> Path | None:
    """Return the path of the file `name` in a directory, or None if the file is missing. The caller copies the file.

    Raises UserError for a symbolic link out of the directory, whose target may be private. A link inside one repository
    of the Hugging Face cache, from models--OWNER--NAME/snapshots to its blobs, is followed.
    """
    path, home = directory / name, directory.resolve()
    if not path.exists():
        return None
    real = path.resolve()
    homes = [home, *(parent for parent in home.parents if parent.name.startswith("models--"))][:2]
    if not any(real.is_relative_to(place) for place in homes):
        raise UserError(
            f"{path} is a symbolic link to a file outside of its directory.",
            f"An export of the model would copy the target {real}.",
            f"If the target belongs to the tokenizer, replace the link by a copy:  "
            f"cp --remove-destination {shlex.quote(str(real))} {shlex.quote(str(path))}",
        )
    if not path.is_file():
        raise UserError(
            f"{path} is not a regular file.", "Files next to a tokenizer.json are exported with the tokenizer."
        )
    return path


def _read_generation(directory: Path) -> dict[str, Any]:
    find_file(directory, GENERATION)
    return read_generation_config(directory)


def _map_tokens(files: dict[str, bytes]) -> dict[str, Any]:
    """Return the BOS, EOS and padding token ids, by their names in a generation config."""
    if "tokenizer.json" not in files:
        return {}
    config, map, tokenizer = (json.loads(files.get(name, b"{}")) for name in (CONFIG, MAP, "tokenizer.json"))
    words = map_words(config, map)
    ids = {**tokenizer["model"].get("vocab", {})} if isinstance(tokenizer["model"].get("vocab"), dict) else {}
    ids |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    tokens = {}
    for name in ("bos", "eos", "pad"):
        if (word := words.get(f"{name}_token")) in ids:
            tokens[f"{name}_token_id"] = ids[word]
    return tokens
