"""Core's suite for data sources."""

from __future__ import annotations

from pathlib import Path

from gangline.testing import DataSourceSuite
from gangline_dataloader.prepare.run import prepare
from gangline_dataloader.prepare.settings import Settings


class TestTokens(DataSourceSuite):
    choice = "data=tokens"
    can = {"epochs", "disjoint", "reads"}

    def corpus(self, directory: Path, first: int = 0, words: int = 1500) -> tuple[str, ...]:
        text, store = directory / f"{first}-{words}.txt", directory / f"{first}-{words}"
        if store.exists():
            return (f"data.path={store}",)
        text.write_text(self.text(first, words))
        prepare([str(text)], store, Settings(clean=()), 1, lambda done, total: None)
        return (f"data.path={store}",)


class TestTokensInSpans(TestTokens):
    settings = ("data.shuffle_span=640",)


class TestTokensByDocument(TestTokens):
    settings = ("data.documents=true",)


class TestTokensInTheOrderOfText(TestTokens):
    settings = ("data.order=text",)
