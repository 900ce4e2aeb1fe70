"""Refusal of unknown fields and invalid values of a config.json, and its list of harmless fields. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gangline.config.ranges import explain_wrong, format_range, is_of
from gangline.config.values import describe
from gangline.errors import UserError

# Fields that do not change the model's outputs: special tokens, files, and training-only fields (also dropout, which
# gangline's modules do not have).
HARMLESS = frozenset(
    (
        *("architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "initializer_range"),
        *("max_position_embeddings", "pretraining_tp", "task_specific_params", "problem_type", "id2label", "label2id"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "output_attentions"),
        *("output_hidden_states", "return_dict", "chunk_size_feed_forward", "cache_implementation"),
        *("unsloth_version", "unsloth_fixed", "is_llama_config", "transformers.js_config"),
    )
)
# Field -> harmless value; any other value is refused.
OFF = dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "rope_interleaved"), False)


def refuse_unknown(directory: str | Path, hf_config: Mapping[str, Any], read_names: Collection[str]) -> None:
    """Raise UserError if a field that was not read may change the model: it is not null and not harmless."""
    unknown_fields = {
        name: value
        for name, value in hf_config.items()
        if value is not None
        and name not in read_names
        and name not in HARMLESS
        and not name.startswith("_")
        and OFF.get(name, ...) != value
    }
    if unknown_fields:
        raise UserError(
            f"{directory} holds a model with unknown {', '.join(f'{n}={v}' for n, v in unknown_fields.items())}.",
            "gangline does not know whether such a field changes the outputs of the model.",
            "Remove the field from config.json if the outputs do not depend on it.",
        )


def check_value(name: str, value: Any, hint: Any, holder: str = "a model") -> Any:
    """Return the value of a field of config.json. Raises UserError if the value does not fit the hint.

    hint: type and range of the value, as for an option. holder: subject of the error message.
    """
    if complaint := _explain_mismatch(hint, value):
        text = json.dumps(value, default=str)
        text = text if len(text) <= 80 else f"{text[:80]}..."
        raise UserError(f"{holder} with invalid {name}={text}.", f"{name} of config.json {complaint}.")
    return value


def _explain_mismatch(hint: Any, value: Any) -> str | None:
    """Return the requirement that `value` violates, as in "must be text"; None if the value fits.

    An integer beyond 64 bits is refused: it is larger than any valid size, and may overflow a float.
    """
    if not is_of(hint, value):
        return f"must be {', '.join(filter(None, (describe(hint), format_range(hint))))}"
    return "must be less than 2^63" if _exceeds_64_bits(value) else explain_wrong(hint, value)


def _exceeds_64_bits(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_exceeds_64_bits, value))
    return isinstance(value, int) and not -(2**63) <= value < 2**63
