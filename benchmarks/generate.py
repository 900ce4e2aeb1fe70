"""Compare the tokens per second of `gangline sample` with transformers' `generate`, for the same weights.

    python benchmarks/generate.py --size small --prompts 1 8 --rounds 5

Greedy decoding, float32, on the CPU; both use a KV cache, and all prompts have the same length. The ways alternate in
random order, and their tokens must be equal. Prints medians over the rounds of the tokens per second of wall time and
of CPU time, and the ratios. `uncached` is gangline without a KV cache.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gangline.config.defaults import build_default_run
from gangline.model.build import build_model, materialise
from gangline.model.compose import compose_model
from gangline.model.init import list_shards
from gangline.model.init_weights import draw_weights
from gangline.runtime import Sampling
from gangline_basics.model.columns import lay_out_by_columns
from gangline_basics.sampling.sampler import generate
from gangline_models.hugging_face.config import read_model_config

SIZES = {  # Qwen2 models: (layers, width, heads, key heads, feed-forward width, vocabulary)
    "tiny": (4, 128, 4, 2, 384, 1024),
    "small": (8, 512, 8, 2, 1408, 32_000),
    "base": (12, 768, 12, 4, 2048, 50_257),
}


def models(size: str, context: int):
    """Return (transformers' model, gangline's model) with the same weights."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    layers, dim, heads, kv_heads, hidden, vocabulary = SIZES[size]
    config = Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=hidden,
        vocab_size=vocabulary,
        max_position_embeddings=context,
    )
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        run = build_default_run(model=read_model_config(Path(directory)), batch={"sequence_length": context})
        tree, plan = compose_model(run)
        ours = materialise(build_model(tree, plan), plan)
        draw_weights(run, list_shards(ours, plan), plan)
        lay_out_by_columns(ours)
    return theirs, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uncached", action="store_true", help="also measure gangline without a KV cache")
    asked = parser.parse_args()
    theirs, ours = models(asked.size, asked.length + asked.tokens)
    how = Sampling(tokens=asked.tokens)
    for count in asked.prompts:
        generator = torch.Generator().manual_seed(1)
        prompts = torch.randint(SIZES[asked.size][-1], (count, asked.length), generator=generator)

        def transformers(prompts: torch.Tensor = prompts) -> list[list[int]]:
            mask = torch.ones_like(prompts)
            found = theirs.generate(
                prompts,
                attention_mask=mask,
                max_new_tokens=asked.tokens,
                min_new_tokens=asked.tokens,
                do_sample=False,
                pad_token_id=0,
            )
            return found[:, asked.length :].tolist()

        def mine(cached: bool, prompts: torch.Tensor = prompts) -> list[list[int]]:
            return [one.tokens for one in generate(ours, prompts.tolist(), how, cached=cached)]

        ways: dict[str, Callable[[], list[list[int]]]] = {"transformers": transformers, "cached": lambda: mine(True)}
        if asked.uncached:
            ways["uncached"] = lambda: mine(False)
        wall: dict[str, list[float]] = {name: [] for name in ways}
        cpu: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(asked.rounds + 1):
            found = []
            for name in random.sample(list(ways), len(ways)):
                began, used = time.perf_counter(), time.process_time()
                found.append(ways[name]())
                if number:  # the first round is a warm-up
                    wall[name].append(time.perf_counter() - began)
                    cpu[name].append(time.process_time() - used)
            assert all(texts == found[0] for texts in found), "the ways generated different tokens"
        made = count * asked.tokens
        for name in ways:
            seconds, used = (statistics.median(one[name]) for one in (wall, cpu))
            ratios = [statistics.median(one["transformers"]) / statistics.median(one[name]) for one in (wall, cpu)]
            print(
                f"{asked.size} {count} prompts  {name:12}  {made / seconds:8.1f} tokens/s  "
                f"{made / used:8.1f} tokens/CPU s  x {ratios[0]:.2f} wall, x {ratios[1]:.2f} CPU"
            )


if __name__ == "__main__":
    main()
