"""Reads a config.json field by field, and refuses what nobody asked for. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangline import UserError

# What says nothing of what the model computes from its weights: tokens, files, and what is of training alone. (Dropout
# is: gangline's modules have none.)
HARMLESS = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "initializer_range"),
        *("max_position_embeddings", "pretraining_tp", "task_specific_params", "problem_type", "id2label", "label2id"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "output_attentions"),
        *("output_hidden_states", "return_dict", "chunk_size_feed_forward", "cache_implementation"),
        *("unsloth_version", "unsloth_fixed"),
    )
)


class ConfigReader:
    """The fields of a config.json. What nobody has asked for by the end is refused by its name.

    A field that is not there is what the class of transformers has for it: whoever asks says what that is. A field that
    is null is null.
    """

    def __init__(self, directory: str | Path, theirs: Mapping[str, Any]) -> None:
        self.directory, self._theirs = directory, theirs
        self._asked: set[str] = set()

    def take(self, name: str, absent: Any = None) -> Any:
        """The field, which may be null, or `absent` where the file has none."""
        self._asked.add(name)
        return self._theirs.get(name, absent)

    def given(self, name: str, absent: Any) -> Any:
        """The same of a field that means nothing as null. Raises UserError where it is."""
        if (found := self.take(name, absent)) is None:
            raise self.refused(name, "null", "transformers has no meaning for that.")
        return found

    def need(self, name: str) -> Any:
        """The field. Raises UserError where there is none."""
        if (found := self.take(name)) is None:
            raise self.lacks(name)
        return found

    def only(self, name: str, *values: Any) -> None:
        """Raises UserError where the field is there with another value than these. Null and false are both: not so."""
        found = self.take(name, values[0])
        off = (found is None or found is False) and (values[0] is None or values[0] is False)
        if found not in values and not off:
            raise self.refused(name, found, f"gangline's model has only {name}={values[0]}.")

    def lacks(self, name: str) -> UserError:
        """The error of a field that must be there."""
        return UserError(f"{self.directory}/config.json does not give {name}.")

    def refused(self, name: str, value: Any, why: str) -> UserError:
        """The error of a field that we cannot compute."""
        return UserError(f"{self.directory} holds a model with {name}={value}.", why)

    def finish(self) -> None:
        """Raises UserError where a field is left over that says something."""
        left = {
            name: value
            for name, value in self._theirs.items()
            if value is not None and name not in self._asked | HARMLESS and not name.startswith("_")
        }
        if left:
            raise UserError(
                f"{self.directory} holds a model with {', '.join(f'{n}={v}' for n, v in left.items())}.",
                "gangline does not know what that changes in what the model computes.",
                "Where it changes nothing, take it out of config.json.",
            )
