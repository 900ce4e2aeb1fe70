"""Random compositions: a run, its layouts and its kills.

Some compositions are invalid and must be refused.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 6
# The loss of a step beside that of one process, relative. float64: the suite. float32: 1e-5 on step 1, and what AdamW
# makes of that in a few more. The others round each matmul: the loss is the same to that rounding.
BOUND = {"fp64": 1e-12, "fp32": 2e-4, "bf16": 2e-2, "fp16": 2e-2, "fp8": 5e-2}
AXES = {
    "3d": ("dp_replicate", "dp_shard", "cp", "pp", "tp"),
    "hsdp": ("dp_replicate", "dp_shard"),
}


@dataclass(frozen=True)
class Drawn:
    """Words of `train` for the run, for its first layout and for those that it goes on with."""

    run: list[str]
    layouts: list[list[str]]
    kills: list[int]  # the step behind which each layout but the last is killed

    @property
    def precision(self) -> str:
        return next(word.partition("=")[2] for word in self.run if word.startswith("precision="))


def drawn(seed: int, number: int) -> Drawn:
    """Composition `number` of a seed: the same each time, whichever others are drawn."""
    dice = random.Random(f"{seed}/{number}")
    moe = dice.random() < 0.4
    layouts = [_layout(dice, moe) for _ in range(dice.choice((1, 2, 2, 3)))]
    kills = sorted(dice.sample(range(1, STEPS), len(layouts) - 1))
    return Drawn(_run(dice, moe, saves=len(layouts) > 1), layouts, kills)


def _run(dice: random.Random, moe: bool, saves: bool) -> list[str]:
    even = dice.random() < 0.7  # sizes that most layouts divide; others meet the refusals
    kv_heads, queries, head_dim = (
        (dice.choice((4, 8)) if even else dice.choice((1, 2, 3, 4))),
        dice.choice((1, 2, 3)),
        dice.choice((2, 4, 6, 8, 10)),
    )
    words = {
        "model": "tiny",
        "model.dim": dice.choice((16, 24, 30, 35, 48)),
        "model.layers": dice.choice((4, 5, 6, 8)) if even else dice.randint(1, 5),
        "model.heads": kv_heads * queries,
        "model.kv_heads": kv_heads,
        "model.head_dim": head_dim,
        "model.ffn_dim": dice.choice((24, 48, 64)) if even else dice.choice((24, 31, 40)),
        "model.vocab_size": dice.choice((256, 257, 260)),
        "model.tied": _maybe(dice),
        "model.qk_norm": _maybe(dice),
        "batch.global_size": dice.choice((8, 16, 24)) if even else dice.choice((4, 6, 7, 12)),
        "batch.sequence_length": dice.choice((16, 24, 32, 48)) if even else dice.choice((8, 12, 15)),
        "precision": dice.choices(list(BOUND), (12, 4, 2, 1, 1))[0],
        "optimizer": dice.choice(("adamw", "adamw", "muon")),
        "optimizer.clip_norm": dice.choice(("1.0", "null", "0.1")),
        "schedule": dice.choice(("constant", "cosine", "wsd")),
        "run.seed": dice.randint(0, 99),
        "run.steps": STEPS,
        "run.sample": 0,
        "validate.every": dice.choice(("null", "2", "3")),
        "validate.samples": dice.choice((3, 8)),
        "track": "[jsonl]",
        "checkpoint": dice.choice(("torch", "zarr", "zarr")) if saves else dice.choice(("off", "torch", "zarr")),
    }
    if saves:
        words["checkpoint.every"] = dice.choice((1, 2))
    if moe:
        words |= _moe(dice, even)
    return [f"{name}={value}" for name, value in words.items()]


def _moe(dice: random.Random, even: bool) -> dict[str, object]:
    """Dropless experts; capacities and expert choice are outside of the suite."""
    router = dice.choice(("softmax", "sigmoid", "grouped"))
    words: dict[str, object] = {
        "moe": "on",
        "moe/router": router,
        "moe.experts": dice.choice((4, 6, 8)) if even else dice.choice((2, 3, 5)),
        "moe.top_k": dice.choice((1, 2, 3)),
        "moe.shared": dice.choice((0, 0, 1)),
        "moe.first": dice.choice((0, 0, 1)) if even else 0,
        "moe.every": dice.choice((1, 1, 2)),
        "moe.router.z_loss": dice.choice((0.0, 0.001)),
        "moe.router.jitter": dice.choice((0.0, 0.0, 0.01)),
        "moe.router.global_aux_loss": dice.choice((0.0, 0.01)),
    }
    if router == "grouped":
        words |= {"moe.router.groups": 2, "moe.router.top_groups": dice.choice((1, 2))}
    return words


def _layout(dice: random.Random, moe: bool) -> list[str]:
    """How one attempt is carried. What the run itself leaves to the layout is drawn with it."""
    part = dice.choices(("3d", "fsdp", "hsdp", "tp", "pp", "ddp", "single"), (8, 3, 2, 2, 2, 2, 1))[0]
    sizes = dict.fromkeys(AXES.get(part, ()), 1)
    world = 1 if part == "single" else dice.choice((2, 3, 4, 4, 6, 8))
    left = world
    while left > 1 and sizes:
        prime = 2 if left % 2 == 0 else 3
        sizes[dice.choice(list(sizes))] *= prime
        left //= prime
    words: dict[str, object] = {"parallel": part, "launch.processes": world}
    words |= {f"parallel.{axis}": size for axis, size in sizes.items()}
    words["run.recompute"] = dice.choice(("none", "none", "selective", "full"))
    words["batch.micro_size"] = dice.choice(("null", "null", 1, 2))
    words["run.deterministic"] = dice.choice(("false", "false", "true"))
    if part not in ("single", "ddp"):
        words |= _cuts(dice, part, sizes)
    if moe:
        asks = part not in ("single", "ddp") and dice.random() < 0.4
        words["moe.ep"] = dice.choice((1, 2, 4)) if asks else "null"
        words["moe.ep_axes"] = dice.choice(("[dp_shard,cp]", "[dp_shard]", "[tp]", "[dp_shard,tp]"))
    return [f"{name}={value}" for name, value in words.items()]


def _cuts(dice: random.Random, part: str, sizes: dict[str, int]) -> dict[str, object]:
    words: dict[str, object] = {}
    if part in ("3d", "fsdp", "hsdp"):
        words["parallel.zero"] = dice.choice((0, 1, 2, 3)) if part == "3d" else dice.choice((1, 2, 3))
        words["parallel.prefetch"] = dice.choice((0, 1, 2))
    if part == "pp" or sizes.get("pp", 1) > 1:
        words["parallel.schedule"] = dice.choice(("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"))
    if sizes.get("cp", 1) > 1:
        words["parallel.context"] = dice.choice(("ring", "ulysses"))
    if part == "tp" or sizes.get("tp", 1) > 1:
        words["parallel.sequence_parallel"] = dice.choice(("true", "true", "false"))
    return words


def _maybe(dice: random.Random) -> str:
    return dice.choice(("true", "false"))
