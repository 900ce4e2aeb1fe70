"""Converter of multi-token prediction from and to config.json. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gangline_models.hugging_face.contract import EditFormat
from gangline_models.hugging_face.tensors import list_tensor_names
from gangline_models.mtp.config import Mtp

FIELD = "num_nextn_predict_layers"  # field with the number of MTP modules in the files
DEEPSEEK = "DeepseekV3ForCausalLM"


class MtpFormat(EditFormat):
    """Converter of DeepSeek-V3's MTP modules; other models are exported without MTP modules."""

    def read(self, cls: type[Mtp], config: dict[str, Any]) -> tuple[Mtp, dict[str, Any]] | None:
        depth = config.get(FIELD)
        if config.get("architectures") != [DEEPSEEK] or not isinstance(depth, int) or depth < 1:
            return None
        return cls(depth=depth), {name: value for name, value in config.items() if name != FIELD}

    def write(self, options: Mtp, config: dict[str, Any]) -> dict[str, Any]:
        return config | ({FIELD: options.depth} if FIELD in config else {})

    def has_weights(self, options: Mtp, directory: str | Path) -> bool:
        return any(name.endswith(".eh_proj.weight") for name in list_tensor_names(directory))
