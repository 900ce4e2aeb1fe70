"""What the package offers. Torch-free."""

from __future__ import annotations

from gangline import Part
from gangline_finetune.chat.config import ChatConfig
from gangline_finetune.lora.config import LoraConfig

PARTS = (
    Part(
        group="lora",
        name="on",
        config=LoraConfig,
        build="gangline_finetune.lora.edit:edit",
        summary="Low-rank adapters around linears, trained alone: LoRA, rsLoRA, DoRA",
    ),
)
SOURCES = (
    Part(
        name="chat",
        config=ChatConfig,
        build="gangline_finetune.chat.source:build",
        summary="conversations by the tokenizer's own chat template: what the assistant says is learnt",
    ),
)
