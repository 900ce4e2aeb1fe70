"""Define the hooks of mkdocs: navigation from docs/index.md, notebooks, pages outside docs/, links to source files."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import notebook_page
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
INDEX = ROOT / "docs" / "index.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def list_outside() -> dict[str, str]:
    """Return path in the repository -> path in the site, for each page outside docs/."""
    pages = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "project/contributing.md",
        "SECURITY.md": "project/security.md",
        "AGENTS.md": "project/agents.md",
    }
    for path in sorted(ROOT.glob("packages/*/README.md")):
        pages[f"packages/{path.parent.name}/README.md"] = f"packages/{path.parent.name}.md"
        pages[f"packages/{path.parent.name}/CHANGELOG.md"] = f"packages/{path.parent.name}-changelog.md"
    return {source: target for source, target in pages.items() if (ROOT / source).exists()}


def get_target(path: str) -> str | None:
    """Return the path in the site of a file of the repository, or None if the file is no page."""
    if path.startswith("docs/") and path.endswith((".md", ".svg", ".png")):
        return path.removeprefix("docs/")
    if path.startswith("docs/notebooks/") and path.endswith(".ipynb"):
        return path.removeprefix("docs/").removesuffix(".ipynb") + ".md"
    return list_outside().get(path)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Build the navigation from the lists of docs/index.md, with a section for each heading."""
    nav: list[Any] = [{"gangline": "index.md"}]
    for section in re.split(r"^## ", INDEX.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        links = [(words, posixpath.normpath(f"docs/{link}")) for words, link in LINK.findall(text)]
        entries = [{words[0].upper() + words[1:]: get_target(path)} for words, path in links]
        nav.append({title: entries})
    nav.append({"Packages": [target for target in list_outside().values() if target.startswith("packages/")]})
    for section in nav:
        for title, words, folder in (
            ("Reference", "Options by group", "options"),
            ("Project", "Source files", "code-map"),
        ):
            if title in section:
                pages = sorted(f"{folder}/{path.name}" for path in (INDEX.parent / folder).glob("*.md"))
                section[title].append({words: pages})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/ and the notebooks. README.md is the front page; docs/index.md is the navigation."""
    files.remove(files.src_uris["index.md"])
    for source, target in list_outside().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    for path in notebook_page.list_notebooks(INDEX.parent):
        text, images = notebook_page.convert(path)
        for name, content in {f"{path.stem}.md": text, **images}.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links at the pages of the site. A link to a source file becomes the path of the file in the repository."""
    outside = {target: source for source, target in list_outside().items()}
    source = outside.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else rewrite(part, source, page.file.src_uri) for part in parts)


def rewrite(text: str, source: str, uri: str) -> str:
    """Return the text of a page of the repository, with links rewritten for the site."""

    def replace(match: re.Match[str]) -> str:
        words, link = match.groups()
        if re.match(r"https?:|mailto:|#", link):
            return match[0]
        path, _, anchor = link.partition("#")
        full = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = get_target(full)
        if target is None:
            return words if f"`{full}`" in words else f"{words} (`{full}`)"
        relative = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"[{words}]({relative}{'#' + anchor if anchor else ''})"

    return LINK.sub(replace, text)
