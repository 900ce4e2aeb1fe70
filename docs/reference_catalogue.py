"""Write core's catalogue.json: the parts in the packages of the repository, and the options of other frameworks."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from gangline.config.schema import EditConfig
from gangline.plugin.catalogue import KnownPart
from gangline.plugin.hooks import DISTRIBUTION
from gangline.plugin.registry import installed

MIGRATE = Path(__file__).parent / "migrate"
OPTION = re.compile(r"[a-z_]+(\.[a-z_]+)+")


def catalogue(ours: set[str]) -> str:
    """Return the catalogue as JSON. ours: the distributions of the repository; all must be installed."""
    found = installed()
    offers = [offer for group in found.list_groups() for offer in found.get_offers(group).values()]
    offers = [offer for offer in offers if offer.distribution in ours - {DISTRIBUTION}]
    parts = [
        asdict(
            KnownPart(
                group=offer.group,
                name=offer.part.name,
                distribution=offer.distribution,
                summary=offer.part.summary,
                edit=issubclass(offer.part.config, EditConfig),
                default=offer.part.default,
            )
        )
        for offer in offers
    ]
    verbs = {verb: name for name in sorted(ours - {DISTRIBUTION}) for verb in found.list_verbs(name)}
    words = {theirs: said for offer in offers for theirs, said in offer.part.words.items()}
    synonyms = {path: names for offer in offers for path, names in offer.synonyms.items()}
    for names, answer in read_rows("names.md"):
        if OPTION.fullmatch(answer):
            synonyms[answer] = f"{' '.join(names)} {synonyms.get(answer, '')}".strip()
        else:
            words[" ".join(names)] = answer
    content = {"parts": parts, "verbs": dict(sorted(verbs.items())), "words": words, "synonyms": synonyms}
    return json.dumps({**content, "peers": read_migration_tables()}, indent=1) + "\n"


def read_migration_tables() -> dict[str, str]:
    """Return option of another framework -> second column of its table in docs/migrate/*.md.

    Options are in lower case with underscores. Raises ValueError if two tables have different answers for an option.
    """
    answers: dict[str, str] = {}
    for page in sorted({path.name for path in MIGRATE.glob("*.md")} - {"names.md"}):
        for names, ours in read_rows(page):
            for theirs in names:
                key = theirs.lstrip("-").lower().replace("-", "_")
                if answers.setdefault(key, ours) != ours:
                    raise ValueError(f"{page}: {theirs} is {ours} here and {answers[key]} on another page")
    return answers


def read_rows(page: str) -> list[tuple[list[str], str]]:
    """Return (names in the first column, text of the second column) of each row of a page in docs/migrate/."""
    rows = re.findall(r"^\| ((?:`[^`]+` ?)+)\| `([^`]+)` \|", (MIGRATE / page).read_text(), re.MULTILINE)
    return [(re.findall("`([^`]+)`", names), answer) for names, answer in rows]
