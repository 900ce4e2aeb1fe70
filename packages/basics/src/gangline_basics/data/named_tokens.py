"""Special tokens that a tokenizer names, such as bos_token, from the files next to tokenizer.json. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline.storage.files import read_regular

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return name -> text of special tokens in tokenizer_config.json and special_tokens_map.json, like transformers.

    If tokenizer_config.json has `added_tokens_decoder`, special_tokens_map.json is ignored; otherwise it takes
    precedence. Raises UserError for a file that cannot be read.
    """
    return map_words(read_object(directory / CONFIG), read_object(directory / MAP))


def map_words(config: dict[str, Any], map: dict[str, Any]) -> dict[str, str]:
    """Return name -> text of the special tokens, given tokenizer_config.json and special_tokens_map.json."""
    entries = config if "added_tokens_decoder" in config else {**config, **map}
    words = {}
    for name, value in entries.items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            words[name] = word
    return words


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return a model's generation config, or without that file the token ids of config.json, like transformers.

    Raises UserError for a file that cannot be read.
    """
    if (directory / GENERATION).exists():
        return read_object(directory / GENERATION)
    config = read_object(directory / "config.json")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in ids if config.get(name) is not None}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if the file is missing. Raises UserError for other content."""
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read.", "The file must contain a JSON object.")
    return content
