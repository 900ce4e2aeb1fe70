"""Write the recipes of published models: packages/models/src/gangline_models/conf/recipe. Takes an hour or two.

python configs/recipes.py [NAME ...]

The planner searches the fastest layout that leaves a tenth of each GPU's memory free. A recipe that does not fit is not
written. Learning rates: pretraining, GPT-3 (arXiv 2005.14165, table 2.1) up to 2 B parameters and Llama 3 (arXiv
2407.21783, table 3) above; supervised fine-tuning and DPO, Tulu 3 (arXiv 2411.15124); LoRA, QLoRA (arXiv 2305.14314).
Run lengths: 20 tokens per parameter for pretraining (arXiv 2203.15556), else 1,000 steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline.config.compose import compose_one
from gangline.mesh import AXES
from gangline_basics.cluster.file import Cluster, load_cluster
from gangline_planner.alternatives import build_mesh
from gangline_planner.assumed import complete_words
from gangline_planner.search import search

FOLDER = Path(__file__).parent.parent / "packages/models/src/gangline_models/conf/recipe"
CLUSTER = "h100_ib"
FREE = 0.1  # share of a GPU's memory that a plan leaves free, for the allocator, NCCL and the CUDA context
ONE_NODE = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1")  # fully sharded data parallelism alone
METHODS = {
    "pretrain": "pretraining",
    "sft": "supervised fine-tuning of all weights",
    "lora": "supervised fine-tuning with LoRA",
    "dpo": "preference optimization (DPO) of all weights",
}
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """A published model. billions: number of parameters; length: tokens per sequence; parts: choices of parts."""

    title: str
    billions: float
    length: int = 4096
    parts: tuple[tuple[str, str], ...] = ()


MODELS = {
    "gpt2-124m": Model("GPT-2 124M", 0.124, 1024, parts=(("model", "gpt2"),)),
    "gpt2-xl": Model("GPT-2 XL", 1.56, 1024),
    "llama3-1b": Model("Llama 3.2 1B", 1.24, 8192),
    "llama3-8b": Model("Llama 3.1 8B", 8.03, 8192),
    "llama3-70b": Model("Llama 3.1 70B", 70.6, 8192),
    "llama3-405b": Model("Llama 3.1 405B", 405, 8192),
    "qwen3-0.6b": Model("Qwen3 0.6B", 0.6),
    "qwen3-8b": Model("Qwen3 8B", 8.2),
    "qwen2.5-7b": Model("Qwen2.5 7B", 7.6),
    "qwen2.5-72b": Model("Qwen2.5 72B", 72.7),
    "gemma3-1b": Model("Gemma 3 1B", 1.0),
    "gemma2-2b": Model("Gemma 2 2B", 2.6),
    "gemma2-9b": Model("Gemma 2 9B", 9.2),
    "gemma2-27b": Model("Gemma 2 27B", 27.2),
    "olmo2-7b": Model("OLMo 2 7B", 7.3),
    "olmo2-13b": Model("OLMo 2 13B", 13.7),
    "phi3-mini": Model("Phi 3 mini", 3.8),
    "granite3-8b": Model("Granite 3.0 8B", 8.2),
    "gpt-oss-20b": Model("gpt-oss 20B", 20.9, parts=(("moe", "gpt_oss_20b"),)),
    "gpt-oss-120b": Model("gpt-oss 120B", 117, parts=(("moe", "gpt_oss_120b"),)),
}
# model -> method -> numbers of GPUs
RUNS: dict[str, dict[str, tuple[int, ...]]] = {
    "gpt2-124m": {"pretrain": (1, 8)},
    "gpt2-xl": {"pretrain": (8,)},
    "llama3-1b": {"pretrain": (1, 8, 64), "sft": (1, 8), "lora": (1,), "dpo": (1,)},
    "llama3-8b": {"pretrain": (8, 64, 1024), "sft": (8, 64), "lora": (1, 8), "dpo": (8,)},
    "llama3-70b": {"pretrain": (64, 1024), "sft": (64,), "lora": (8, 64), "dpo": (64,)},
    "llama3-405b": {"pretrain": (1024,), "sft": (1024,), "lora": (64,), "dpo": (1024,)},
    "qwen3-0.6b": {"pretrain": (1, 8), "sft": (1,), "lora": (1,), "dpo": (1,)},
    "qwen3-8b": {"pretrain": (8, 64, 1024), "sft": (8,), "lora": (1, 8), "dpo": (8,)},
    "qwen2.5-7b": {"sft": (8,), "lora": (1,), "dpo": (8,)},
    "qwen2.5-72b": {"pretrain": (64, 1024), "sft": (64,), "lora": (8, 64), "dpo": (64,)},
    "gemma3-1b": {"pretrain": (1, 8), "sft": (1,), "lora": (1,), "dpo": (1,)},
    "gemma2-2b": {"pretrain": (8,), "sft": (8,), "lora": (1,)},
    "gemma2-9b": {"pretrain": (64,), "sft": (8,), "lora": (1, 8), "dpo": (8,)},
    "gemma2-27b": {"pretrain": (64, 1024), "sft": (64,), "lora": (8,), "dpo": (64,)},
    "olmo2-7b": {"pretrain": (8, 64, 1024), "sft": (8,), "lora": (1, 8), "dpo": (8,)},
    "olmo2-13b": {"pretrain": (64, 1024), "sft": (64,), "lora": (8,), "dpo": (64,)},
    "phi3-mini": {"pretrain": (8,), "sft": (8,), "lora": (1,), "dpo": (8,)},
    "granite3-8b": {"pretrain": (64,), "sft": (8,), "lora": (1,), "dpo": (8,)},
    "gpt-oss-20b": {"pretrain": (64,), "sft": (8, 64)},
    "gpt-oss-120b": {"pretrain": (1024,), "sft": (64,)},
}


@dataclass(frozen=True)
class Recipe:
    """One recipe before its layout is known."""

    model: str
    method: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.method}-{self.gpus}gpu"

    @property
    def title(self) -> str:
        gpus = f"{self.gpus:,} GPU" + "s" * (self.gpus > 1)
        paths = "data.path" if self.method == "pretrain" else "model.weights and data.path"
        return f"{MODELS[self.model].title}: {METHODS[self.method]} on {gpus}. Set {paths}."

    def settle(self) -> Sections:
        """Return the recipe's sections without the layout."""
        shape, pretraining = MODELS[self.model], self.method == "pretrain"
        parts: dict[str, Any] = {"model": self.model, **dict(shape.parts)}
        parts["parallel"] = "single" if self.gpus == 1 else "fsdp" if self.gpus == 8 else "3d"
        parts |= {"precision": "bf16", "checkpoint": "zarr"}
        if self.gpus > 1:
            parts["health"] = ["monitors"]
        if self.gpus > 8:
            parts["launch"] = "slurm"
        parts["data"] = {"pretrain": "tokens", "dpo": "preferences"}.get(self.method, "chat")
        length = shape.length if pretraining else min(4096, shape.length)
        size = self.choose_batch_tokens() // length if pretraining else 128
        steps = round_number(20e9 * shape.billions / (size * length)) if pretraining else 1000
        sections: Sections = {
            "parts": parts,
            "run": {"name": f"{self.model}-{self.method}", "steps": steps},
            "batch": {"global_size": size, "sequence_length": length},
            "optimizer": self.set_optimizer(),
            "schedule": {"warmup_steps": 2000} if steps >= 40000 else {},
            "checkpoint": {"every": 500 if pretraining else 250, "keep_last": 2},
            "validate": {"every": 500 if pretraining else 250},
        }
        if self.method == "lora":
            parts["lora"] = "on"
            sections["lora"] = {"rank": 16, "alpha": 32, "base": "bf16"}
            sections["checkpoint"]["save_frozen"] = False
        elif self.method == "dpo":
            parts["dpo"] = "on"
            if shape.parts:
                sections["moe"] = {"router": {"seq_aux_loss": 0}}
        if pretraining:
            sections["data"] = {"document_masking": True}
        if self.gpus > 1:
            nodes = {"nodes": f'"{self.gpus // 8}"', "gpus_per_node": 8}  # the option is text, such as 8:16
            sections["launch"] = {"processes": 8} if self.gpus == 8 else nodes
        return sections

    def choose_batch_tokens(self) -> int:
        """Return the tokens of a step in pretraining: 0.5 M for GPT-2 sizes, up to 16 M for Llama 3 405B."""
        if self.gpus == 1:
            return 2**19
        if self.gpus == 8:
            return 2**20
        return 2**24 if MODELS[self.model].billions > 300 else 2**23 if self.gpus > 64 else 2**22

    def set_optimizer(self) -> dict[str, Any]:
        billions = MODELS[self.model].billions
        if self.method == "pretrain":
            rate = 6e-4 if billions < 0.8 else 3e-4 if billions < 20 else 1.5e-4 if billions < 200 else 8e-5
            return {"learning_rate": rate}
        if self.method == "lora":
            return {"learning_rate": 2e-4 if billions < 20 else 1e-4, "weight_decay": 0}
        rate = (1e-5 if billions < 5 else 5e-6 if billions < 20 else 2e-6) / (10 if self.method == "dpo" else 1)
        return {"learning_rate": rate, "weight_decay": 0}


def round_number(number: float) -> int:
    """Return the number rounded to two digits."""
    return int(float(f"{number:.1e}"))


def list_recipes() -> Iterator[Recipe]:
    """Yield every recipe that is tried."""
    for model, methods in RUNS.items():
        for method, counts in methods.items():
            for gpus in counts:
                yield Recipe(model, method, gpus)


def spell(sections: Sections) -> Iterator[str]:
    """Yield the overrides that set these sections."""
    for section, options in sections.items():
        for key, value in options.items():
            name = key if section == "parts" else f"{section}.{key}"
            yield f"{name}={_spell(value)}"


def _spell(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {_spell(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spell, value)) + "]"
    return (
        {True: "true", False: "false", None: "null"}.get(value, str(value)) if isinstance(value, bool) else str(value)
    )


def format_recipe(title: str, sections: Sections) -> str:
    """Return the text of a recipe file."""
    lines = [f"{name}: {_spell(options).replace(',', ', ')}" for name, options in sections.items() if options]
    return "\n".join([f"# {title}", *lines]) + "\n"


def limit_memory(cluster: Cluster) -> Cluster:
    """Return the cluster with a tenth less memory per GPU."""
    memory = cluster.numbers["memory.bytes"]
    less = replace(memory, value=memory.value * (1 - FREE))
    return replace(cluster, numbers={**cluster.numbers, "memory.bytes": less})


def add_layout(sections: Sections, words: Sequence[str]) -> Sections:
    """Return the sections with the layout of the search."""
    found = {name: dict(options) for name, options in sections.items()}
    found.setdefault("parallel", {})
    for word in words:
        name, _, value = word.partition("=")
        section, _, key = name.partition(".")
        plain: Any = int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)
        if section in ("parallel", "batch", "run") and plain not in ("null", "none"):
            found[section][key] = plain
        elif section not in ("parallel", "batch", "run"):
            found.setdefault(section, {})[key] = plain
    order = ("parts", "run", "batch", "parallel", "moe", "lora", "optimizer", "schedule", "data", "checkpoint")
    return {name: found[name] for name in (*order, *(name for name in found if name not in order)) if name in found}


def shorten(sections: Sections) -> Iterator[Sections]:
    """Yield ways to write a layout, shortest first: axes that are derived left out, and complete.

    A recipe that leaves dp_shard unset runs on other numbers of GPUs, too.
    """
    parts, parallel = sections["parts"], sections["parallel"]
    large = {key: value for key, value in parallel.items() if key not in AXES or value > 1}
    derived = {key: value for key, value in large.items() if key != "dp_shard"}
    if not derived.keys() & set(AXES) and parts["parallel"] == "3d":
        plain = {} if derived == {"zero": 3} else derived  # the default of fsdp
        yield {**sections, "parts": {**parts, "parallel": "fsdp"}, "parallel": plain}
    for options in (derived, large, parallel):
        yield {**sections, "parallel": options}


def write(recipe: Recipe, cluster: Cluster) -> str:
    """Search the layout of a recipe and write its file; return a line on the result."""
    sections = recipe.settle()
    path = FOLDER / f"{recipe.name}.yaml"
    try:
        best = search(complete_words([*spell(sections), *(ONE_NODE if recipe.gpus == 8 else ())]), cluster, shown=1).fit
    except UserError as error:
        return f"{recipe.name}: {error}"
    if not best:
        path.unlink(missing_ok=True)
        return f"{recipe.name}: does not fit"
    sections, plan = add_layout(sections, best[0].words), best[0].plan
    for short in shorten(sections):
        path.write_text(format_recipe(recipe.title, short))
        if build_mesh(compose_one([f"recipe={path}"]).parallel, recipe.gpus) == plan.explained.mesh:
            break
    return f"{recipe.name}: {plan.step.seconds:.3g} s, {plan.memory / 1e9:.3g} GB, MFU {plan.mfu:.1%}"


if __name__ == "__main__":
    limited = limit_memory(load_cluster(CLUSTER))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in list_recipes():
        if not sys.argv[1:] or one.name in sys.argv[1:]:
            print(write(one, limited), flush=True)
