"""Write docs/hooks.md and docs/options.md from the code: docstrings, parts, and the comments behind their options.

python docs/reference.py
"""

from __future__ import annotations

from pathlib import Path

import reference_hooks
import reference_options

DOCS = Path(__file__).parent
COMMAND = "python docs/reference.py"
NOTE = f"<!-- written by  {COMMAND}  from the code: change it there -->\n\n"


def pages() -> dict[str, str]:
    """File name -> what it has to hold."""
    written = {"hooks.md": reference_hooks.page(), "options.md": reference_options.page()}
    return {name: NOTE + text.strip() + "\n" for name, text in written.items()}


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
        print(f"docs/{name}")
