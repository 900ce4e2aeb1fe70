"""Write docs/recipes.md: the recipes of published models, with the planner's memory, step time, MFU and price.

python docs/recipes.py
"""

from __future__ import annotations

import re
from pathlib import Path

import gangline_models
from gangline.config import Recompute
from gangline_basics.cluster.file import Cluster, load_cluster
from gangline_planner.assumed import check_run, complete_words, explain
from gangline_planner.forecast import forecast
from gangline_planner.page import format_number

PAGE = Path(__file__).parent / "recipes.md"
FOLDER = Path(gangline_models.__file__).parent / "conf/recipe"
CLUSTER = "h100_ib"
HEAD = "| recipe | layout | tokens per step | GB per GPU | s per step | tokens/s | MFU | $ per 10⁹ tokens |"
TOP = """<!-- written by  python docs/recipes.py  from the planner: change it there -->

# Recipes for published models

Each recipe is a YAML file in `gangline-models`: `train recipe=NAME` with your data, and with weights for fine-tuning.
The other packages that a recipe needs are named if they are missing.

<!-- not run: needs GPUs -->
```bash
pip install 'gangline[all]'
train recipe=llama3-8b-lora-1gpu model.weights=Llama-3.1-8B data.path=chats.jsonl
train --cfg job recipe=llama3-8b-lora-1gpu      # every option, with its default
gangline plan recipe=llama3-8b-lora-1gpu cluster=h100_ib
```

Before the first release, [install from a clone](how-to/install.md).

- `pretrain` needs `data.path`: a token store that `gangline data prepare TEXTS --out STORE --tokenizer
  Llama-3.1-8B/tokenizer.json` writes. Without `--tokenizer`, the tokens are bytes.
- `sft`, `lora` and `dpo` need `model.weights`, the directory of the published model, and `data.path`: chats or
  preference pairs. Set `run.steps` to the length of your data: a step reads 128 chats or pairs.
- Recipes for 64 and 1,024 GPUs start a Slurm job: `launch.partition=NAME`; `launch.dry_run=true` prints its script. For
  Kubernetes, add `launch=kubernetes`.
- For another number of GPUs or another GPU, `gangline plan search` lists layouts.

The numbers are predictions of the planner, not measurements. [Plan step time, memory and
cost](how-to/what-will-it-cost.md) states its error. A plan leaves a tenth of the memory free. Pretraining runs for 20
tokens per parameter. DPO excludes the scoring by the reference model before the first step. One GPU costs ${price:g}
per hour. Cluster: {about}.
"""


FAMILIES = {
    "Llama 3": "llama",
    "Qwen": "qwen",
    "Gemma": "gemma",
    "OLMo 2": "olmo",
    "GPT-2, Phi 3, Granite 3": ("gpt2", "phi", "granite"),
    "gpt-oss (mixture of experts)": "gpt-oss",
}
METHODS = ("pretrain", "sft", "lora", "dpo")


def list_recipes(family: str) -> list[Path]:
    """Return the files of the recipes of a family: by model, method, and number of GPUs."""
    paths = [path for path in FOLDER.glob("*gpu.yaml") if path.stem.startswith(FAMILIES[family])]
    return sorted(paths, key=_sort_key)


def _sort_key(path: Path) -> tuple[float, str, int, int]:
    model, method, gpus = path.stem.rsplit("-", 2)
    size = re.search(r"([\d.]+)([mb])$", model)  # gpt2-124m, llama3-8b
    billions = float(size[1]) / (1000 if size[2] == "m" else 1) if size else 1
    return billions, model, METHODS.index(method), int(gpus.removesuffix("gpu"))


def format_row(path: Path, cluster: Cluster) -> str:
    """Return the row of a recipe. Raises UserError if it is invalid, ValueError if it does not fit into memory."""
    case = complete_words([f"recipe={path}"])
    if (problem := check_run(case.run)) is not None:
        raise problem
    plan = forecast(explain(case, case.run, cluster), cluster)
    if not plan.fits:
        raise ValueError(f"{path.stem} does not fit: {plan.memory / 1e9:.1f} GB")
    axes = [f"{axis} {size}" for axis, size in plan.explained.mesh.sizes if size > 1]
    axes += [f"ep {size}" for edit in case.run.edits.values() if (size := getattr(edit, "ep", 1)) > 1]
    recompute = "" if case.run.job.recompute is Recompute.none else f"; recompute {case.run.job.recompute.value}"
    tokens = plan.explained.tokens
    price = plan.step.seconds * plan.world * cluster["price.hour"] / 3600 / tokens * 1e9
    layout = (" ".join(axes) or "one process") + recompute
    return (
        f"| `{path.stem}` | {layout} | {format_number(tokens)} | {plan.memory / 1e9:.1f} "
        f"| {plan.step.seconds:.3g} | {format_number(plan.tokens_per_second)} | {plan.mfu:.0%} | {price:,.0f} |"
    )


def write_page() -> str:
    """Return the text of docs/recipes.md."""
    cluster = load_cluster(CLUSTER)
    lines = [TOP.format(about=cluster.about, price=cluster["price.hour"])]
    for family in FAMILIES:
        rows = [format_row(path, cluster) for path in list_recipes(family)]
        lines += [f"## {family}\n", HEAD, "|" + " --- |" * (HEAD.count("|") - 1), *rows, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(write_page())
    print(PAGE)
