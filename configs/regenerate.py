"""Write configs/golden: recipes, and the run that no recipe changes, as `train --cfg job` prints them.

Of the recipes of published models, the golden files contain one for each method of training.

python configs/regenerate.py
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from gangline.cli.train import main
from gangline.config.recipes import find_recipes

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
DEFAULT = "default"  # the golden file of plain `train`
PUBLISHED = ("llama3-8b-pretrain-64gpu", "llama3-8b-sft-8gpu", "llama3-8b-lora-1gpu", "llama3-8b-dpo-8gpu")


def expanded() -> dict[str, str]:
    """Name of a golden file -> what it has to hold. Recipes of this folder and of the installed packages."""
    with contextlib.chdir(HERE.parent):
        names = [name for name in find_recipes() if not name.endswith("gpu") or name in PUBLISHED]
        words = {DEFAULT: []} | {name: [f"recipe={name}"] for name in names}
        return {name: printed(given) for name, given in words.items()}


def printed(words: list[str]) -> str:
    """What `train --cfg job` prints for these words."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["--cfg", "job", *words])
    if code:
        raise SystemExit(code)
    return out.getvalue()


if __name__ == "__main__":
    for old in GOLDEN.glob("*.yaml"):
        old.unlink()
    for name, text in expanded().items():
        (GOLDEN / f"{name}.yaml").write_text(text)
        print(f"{GOLDEN.relative_to(HERE.parent)}/{name}.yaml")
