"""Write the pages and data that are generated from the code: hooks, commands, options, source files, catalogue.

python docs/reference.py
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import reference_agents
import reference_catalogue
import reference_commands
import reference_hooks
import reference_map
import reference_options

from gangline.plugin.catalogue import DATA

DOCS = Path(__file__).parent
ROOT = DOCS.parent
COMMAND = "python docs/reference.py"
NOTE = f"<!-- written by  {COMMAND}  from the code: change it there -->\n\n"


def pages() -> dict[Path, str]:
    """Return file -> its generated text."""
    written = {
        "hooks.md": reference_hooks.page(),
        "commands.md": reference_commands.page(),
        **reference_options.pages(),
    }
    written |= {f"code-map/{name}": text for name, text in reference_map.list_pages().items()}
    ours = {tomllib.loads(path.read_text())["project"]["name"] for path in ROOT.glob("packages/*/pyproject.toml")}
    made = {DOCS / name: NOTE + text.strip() + "\n" for name, text in written.items()}
    made[ROOT / "AGENTS.md"] = NOTE + reference_agents.page()
    return {**made, DATA: reference_catalogue.catalogue(ours)}


if __name__ == "__main__":
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
