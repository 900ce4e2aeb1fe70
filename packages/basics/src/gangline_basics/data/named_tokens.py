"""The tokens that a tokenizer has names for, bos_token and the like, as the files beside it say. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline.storage.files import read_regular

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Name -> word: those of tokenizer_config.json, and those of special_tokens_map.json as transformers takes them.

    A config that lists its added tokens says all; where it does not, the map is heard before it. Raises UserError for
    a file that cannot be read.
    """
    return map_words(read_object(directory / CONFIG), read_object(directory / MAP))


def map_words(config: dict[str, Any], map: dict[str, Any]) -> dict[str, str]:
    """The same, from what the two files hold."""
    entries = config if "added_tokens_decoder" in config else {**config, **map}
    words = {}
    for name, value in entries.items():
        word = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(word, str):
            words[name] = word
    return words


def read_generation_config(directory: Path) -> dict[str, Any]:
    """Return a model's generation config; without that file the token ids of config.json, as transformers does.

    Raises UserError for a file that cannot be read.
    """
    if (directory / GENERATION).exists():
        return read_object(directory / GENERATION)
    config = read_object(directory / "config.json")
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in ids if config.get(name) is not None}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object of a file, empty where there is no such file. Raises UserError for what is none."""
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read.", str(error)) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be read.", "It is no JSON object.")
    return content
