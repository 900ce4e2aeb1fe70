"""Convert a notebook to a page of the site: its cells as Markdown, and its images as files. Needs no Jupyter."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

FENCE = "````"  # the text of a cell may contain three backquotes


def list_notebooks(docs: Path) -> list[Path]:
    """Return the notebooks of the documentation."""
    return sorted(docs.glob("notebooks/*.ipynb"))


def convert(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return (Markdown, image file name -> content) of a notebook."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        language = "yaml" if source.startswith("%%writefile") else "bash" if source.startswith("!") else "python"
        parts.append(f"{FENCE}{language}\n{source}\n{FENCE}")
        for output in cell["outputs"]:
            name = f"{path.stem}-{len(images) + 1}.png"
            if (image := output.get("data", {}).get("image/png")) is not None:
                images[name] = base64.b64decode("".join(image))
                parts.append(f"![Output of the cell above]({name})")
            elif text := read_text(output):
                parts.append(f'{FENCE}text title="Output"\n{text.rstrip()}\n{FENCE}')
    # an HTML link, because the site's links to notebooks point at their pages
    download = f'Download: <a href="{path.name}" download>{path.name}</a>'
    return "\n\n".join([parts[0], download, *parts[1:]]) + "\n", images


def read_text(output: dict[str, Any]) -> str:
    """Return the text of an output of a cell, or "" if the output has none."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
