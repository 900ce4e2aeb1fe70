"""Recipes: named configurations of complete runs in YAML. A recipe is a config.yaml with most options left out.

Recipes are searched in ./configs of the working directory, then in the folder ``conf/recipe`` of every plugin's package
and of gangline itself. If several recipes have one name, the first is used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from gangline.config.sections import SECTIONS
from gangline.config.suggest import suggest_near
from gangline.errors import UserError, escape_controls
from gangline.plugin.registry import installed

LOCAL = Path("configs")
LARGEST = 1 << 20  # maximum size of a recipe in bytes: OmegaConf reads about 250 kB per second


def find_recipes() -> dict[str, Path]:
    """Return name -> path of every recipe in ./configs of the working directory and in installed packages."""
    tops = [module.__name__.partition(".")[0] for module in installed().list_modules()] + ["gangline"]
    roots = [Path(root) for top in tops for root in getattr(sys.modules.get(top), "__path__", ())]
    recipes: dict[str, Path] = {}
    for folder in (LOCAL, *(root / "conf" / "recipe" for root in roots)):
        for path in sorted(folder.glob("*.yaml")):
            recipes.setdefault(path.stem, path)
    return recipes


def read_recipe(name: str) -> dict[str, Any]:
    """Return the content of a recipe; `name` may also be the path of a YAML file. Raises UserError."""
    from omegaconf import OmegaConf  # reads 1e-4 as a number; PyYAML reads it as text
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from gangline.config.yaml_files import check_yaml

    path = Path(name) if name.endswith((".yaml", ".yml")) else find_recipes().get(name)
    if path is None or not path.is_file():
        recipes = find_recipes()
        listing = f"Recipes: {', '.join(recipes) or 'none'}.   (YAML files in ./{LOCAL} and in installed packages)"
        raise UserError(f"there is no recipe {name!r}.", suggest_near(name, recipes), listing)
    if (size := path.stat().st_size) > LARGEST:
        raise UserError(f"the recipe {path} has {size} bytes; the maximum is {LARGEST}.")
    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        content = OmegaConf.to_container(OmegaConf.load(StringIO(text)))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"the recipe {path} cannot be read: {' '.join(str(error).split())}") from error
    return _check(content, path)


def read_summary(path: Path) -> str:
    """Return the first line of a recipe if it is a comment, else ""."""
    first = path.read_text(errors="replace", encoding="utf-8").partition("\n")[0]
    return escape_controls(first.lstrip("# ").strip()) if first.startswith("#") else ""


def _check(content: Any, path: Path) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise UserError(f"the recipe {path} must be a mapping such as 'parts: {{model: tiny}}'.")
    if "defaults" in content:
        raise UserError(
            f"the recipe {path} has a defaults list.", "A recipe chooses its parts by 'parts: {model: tiny, ...}'."
        )
    parts = content.get("parts") or {}
    if not isinstance(parts, Mapping):
        raise UserError(f"the recipe {path}: parts must be a mapping such as {{model: tiny}}.")
    known_keys = ["parts", *SECTIONS, *installed().list_groups()]
    for key, value in content.items():
        if key not in known_keys:
            raise UserError(
                f"the recipe {path} has an unknown key {key!r}.",
                suggest_near(str(key), known_keys),
                f"Keys of a recipe: {known_keys}",
            )
        if not isinstance(value, Mapping | None):
            plain = re.sub(r"\bTrue\b", "on", re.sub(r"\bFalse\b", "off", str(value)))
            hint = f"To choose a part, write  parts: {{{key}: {plain}}}" if key not in SECTIONS else ""
            raise UserError(f"the recipe {path}: {key} must be a mapping of options.", hint)
    return {str(key): value for key, value in content.items() if value is not None}
