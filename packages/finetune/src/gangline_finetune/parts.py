"""Parts of the package: model edits, callbacks and data sources. Torch-free."""

from __future__ import annotations

from gangline import Part
from gangline_finetune.chat.config import ChatConfig
from gangline_finetune.dpo.config import DpoConfig, PreferencesConfig
from gangline_finetune.evaluate.config import EvalConfig
from gangline_finetune.lora.config import LoraConfig

EDITS = (
    Part(
        group="lora",
        name="on",
        config=LoraConfig,
        build="gangline_finetune.lora.edit:edit",
        summary="LoRA, rsLoRA or DoRA: train low-rank adapters of linears, freeze all other weights",
        words={
            "dropout attention_dropout attn_dropout hidden_dropout resid_dropout residual_dropout": (
                "optimizer.weight_decay=0.1  (models have no dropout here; adapters have lora.dropout)"
            )
        },
    ),
    Part(
        group="dpo",
        name="on",
        config=DpoConfig,
        build="gangline_finetune.dpo.edit:edit",
        capabilities={"hugging_face": "gangline_models.hugging_face.contract:SameModel"},
        summary="The loss of direct preference optimization, for data=preferences",
    ),
)
CALLBACKS = (
    Part(
        name="eval",
        config=EvalConfig,
        build="gangline_finetune.evaluate.callback:build",
        summary="evaluation on lm-eval tasks every n steps, on the ranks of the run",
    ),
)
SOURCES = (
    Part(
        name="chat",
        config=ChatConfig,
        build="gangline_finetune.chat.source:build",
        capabilities={"sample": "gangline_basics.sampling.show:show_sample"},
        summary="conversations rendered by the tokenizer's chat template, with the loss on assistant messages",
    ),
    Part(
        name="preferences",
        config=PreferencesConfig,
        build="gangline_finetune.dpo.source:build",
        capabilities={"sample": "gangline_basics.sampling.show:show_sample"},
        summary="pairs of answers, one chosen and one rejected, for dpo=on",
    ),
)
