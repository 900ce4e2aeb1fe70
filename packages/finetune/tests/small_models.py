"""Directories of small transformers models from which runs start."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gangline_models.hugging_face.commands import list_overrides

SHORT = (  # a run of a few steps whose loss changes
    "batch.global_size=4",
    "batch.sequence_length=16",
    "run.sample=0",
    "validate.every=null",
    "track=[jsonl]",
    "track.jsonl.figure=false",
    "precision=fp32",
    "optimizer.learning_rate=0.02",
    "schedule=constant",
)
TOKENS = torch.tensor([[1, 7, 3, 200, 45, 9, 9, 101, 3]])


def llama(directory: Path, seed: int = 0, hidden: int = 48) -> list[str]:
    """Write a Llama with random weights and return the overrides of a run that starts from it."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=255,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return list_overrides(directory)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits (1, T, V) of a few tokens in float32."""
    return model.eval()(TOKENS).logits.float()


def opened(directory: Path) -> torch.nn.Module:
    """Load the model with transformers."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
