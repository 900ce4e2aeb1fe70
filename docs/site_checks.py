"""Check a built site: every page exists and is in the search index, and no page loads anything from another host.

python docs/site_checks.py SITE_DIR
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import notebook_page
import pages

# A request that a browser makes by itself. Links for the reader may go to other hosts.
REMOTE = re.compile(
    r"<(?:script|img|iframe)[^>]+src=[\"']?(?:https?:)?//|<link[^>]+rel=[\"']?stylesheet[^>]+href=[\"']?(?:https?:)?//"
)


def find_faults(site: Path) -> list[str]:
    """Return the errors of a site, one line each."""
    html = sorted(site.rglob("*.html"))
    faults = [
        f"{path.relative_to(site)} loads something from another host"
        for path in html
        if REMOTE.search(path.read_text())
    ]
    found = {
        entry["location"].partition("#")[0]
        for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]
    }
    notebooks = notebook_page.list_notebooks(pages.ROOT / "docs")
    for page in (*pages.PAGES, *notebooks):
        path = page.relative_to(pages.ROOT)
        if path.parts[0] == "docs" and path.name != "index.md":
            wanted = str(path.relative_to("docs").with_suffix(".html"))
            faults += [f"{path} cannot be searched"] if wanted not in found else []
    if len(html) < len(pages.PAGES):
        faults.append(f"{len(html)} pages of {len(pages.PAGES)}")
    return faults


if __name__ == "__main__":
    lines = find_faults(Path(sys.argv[1]))
    print("\n".join(lines) or "every page is built, can be searched, and loads nothing from another host")
    sys.exit(bool(lines))
