"""Train a small GPT in plain PyTorch with the settings of nanoGPT: the baseline of `benchmarks/nanogpt.py`.

B batch, T tokens, D model width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # tokens and targets, both (B, T)


@dataclass(frozen=True)
class Settings:
    """Settings of nanoGPT's CPU configuration for character-level Shakespeare (README.md of karpathy/nanoGPT)."""

    vocab_size: int = 65
    block_size: int = 64
    batch_size: int = 12
    layers: int = 4
    heads: int = 4
    dim: int = 128
    steps: int = 2000
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 100
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def compute_learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: linear warm-up, then a cosine."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        progress = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return self.min_learning_rate + cosine * (self.learning_rate - self.min_learning_rate)


class Block(nn.Module):
    """Attention and feed-forward, each with a LayerNorm before it; no biases."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x_BTD)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class Gpt(nn.Module):
    """GPT with learned positions and a head that shares the embedding's weight."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        s = settings
        self.tokens, self.positions = nn.Embedding(s.vocab_size, s.dim), nn.Embedding(s.block_size, s.dim)
        self.blocks = nn.ModuleList(Block(s.dim, s.heads) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.dim, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean loss."""
        x_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = F.linear(self.norm(x_BTD), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def copy_from(self, arrays: Mapping[str, Tensor]) -> None:
        """Set the weights to those of a gangline model. arrays: gangline's name of a parameter -> values."""
        for name, parameter in self.named_parameters():
            parameter.copy_(find_array(name, arrays))


NAMES = {
    "tokens": "embed.tokens",
    "positions": "embed.positions",
    "norm": "head.norm",
    "norm_1": "attention_norm",
    "norm_2": "feed_forward_norm",
    "out": "attention.wo",
    "up": "feed_forward.w_up",
    "down": "feed_forward.w_down",
}


def find_array(name: str, arrays: Mapping[str, Tensor]) -> Tensor:
    """Return the array of gangline's model that belongs to a parameter of `Gpt`, from weights or gradients by name."""
    *block, module, _ = name.split(".")
    prefix = "".join(f"{part}." for part in block)
    if module == "qkv":
        return torch.cat([arrays[f"{prefix}attention.{one}.weight"] for one in ("wq", "wk", "wv")])
    return arrays[f"{prefix}{NAMES[module]}.weight"]


class Trainer:
    """Training loop of nanoGPT on one process. read: numbers of a step's first and last sample, exclusive -> batch."""

    def __init__(self, settings: Settings, model: Gpt, read: Callable[[int, int], Batch]) -> None:
        self.settings, self.model, self.read, self.step = settings, model, read, 0
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)

    def train(self, steps: int) -> list[float]:
        """Train and return the loss of each step."""
        losses = []
        for _ in range(steps):
            size = self.settings.batch_size
            loss = self.model(*self.read(self.step * size, (self.step + 1) * size))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.settings.compute_learning_rate(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
            losses.append(loss.item())
        return losses
