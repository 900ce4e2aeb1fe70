"""Conformance suite of the testkit for data sources, run on `data=tokens`, `data=dali` and `data=mix`."""

from __future__ import annotations

from pathlib import Path

from gangline.data.base import DataSource
from gangline.data.sample import Sample
from gangline_dataloader.packing.pack_plan import make
from gangline_dataloader.prepare.run import prepare
from gangline_dataloader.prepare.settings import Settings
from gangline_dataloader.store.manifest import FILE, VALIDATION, read
from gangline_testkit import DataSourceSuite


class TestTokens(DataSourceSuite):
    choice = "data=tokens"
    can = {"epochs", "disjoint", "reads"}

    def write_corpus(self, directory: Path, first: int = 0, words: int = 1500) -> tuple[str, ...]:
        text, store = directory / f"{first}-{words}.txt", directory / f"{first}-{words}"
        if store.exists():
            return (f"data.path={store}",)
        text.write_text(self.make_text(first, words))
        prepare([str(text)], store, Settings(clean=()), 1, lambda *_: None)
        return (f"data.path={store}",)


class TestTokensInSpans(TestTokens):
    settings = ("data.shuffle_span=640",)


class TestTokensByDocument(TestTokens):
    settings = ("data.document_masking=true",)


class TestTokensInTheOrderOfText(TestTokens):
    settings = ("data.order=text",)


class TestTokensPacked(TestTokens):
    """Packing splits documents into rows here, because the text of the suite is one document."""

    settings = ("data.packing=best_fit",)
    can = {"disjoint", "reads"}

    def write_corpus(self, directory: Path, first: int = 0, words: int = 1500) -> tuple[str, ...]:
        settings = super().write_corpus(directory, first, words)
        store = Path(settings[0].partition("=")[2])
        for folder in (store, store / VALIDATION):
            for T in (31, 32) if (folder / FILE).exists() else ():
                make(folder, read(folder), T)
        return settings

    def place(self, source: DataSource, sample: Sample) -> tuple[int, int]:
        """Return the range as the suite does, but accept a last row of a few letters and padding."""
        read, text = bytes(sample["tokens"][:-1]).rstrip(b"\0").decode(), self.make_text()
        at = text.rindex(read) if text.endswith(read) else text.index(read)
        return at, at + len(read)


class TestTokensPackedByDocument(TestTokensPacked):
    settings = ("data.packing=best_fit", "data.document_masking=true")


class TestDali(TestTokens):
    choice = "data=dali"


class TestDaliByDocument(TestTokens):
    choice = "data=dali"
    settings = ("data.document_masking=true",)


class TestMix(DataSourceSuite):
    choice = "data=mix"
    settings = ("data.weights={web: 0.7, code: 0.3}",)
    can = {"disjoint", "reads"}

    def write_corpus(self, directory: Path, first: int = 0, words: int = 1500) -> tuple[str, ...]:
        """Write one half of the words to each source."""
        half, settings = words // 2, []
        for name, begin, count in (("web", first, half), ("code", first + half, words - half)):
            store = directory / f"{name}-{begin}-{count}"
            if not store.exists():
                text = directory / f"{store.name}.txt"
                text.write_text(self.make_text(begin, count))
                prepare([str(text)], store, Settings(clean=()), 1, lambda *_: None)
            settings.append(f"data.sources.{name}={store}")
        return tuple(settings)


class TestMixWithStagesAndCaps(TestMix):
    settings = (
        "data.weights={web: 1, code: 0}",
        "data.stages=[{from: 9, weights: {web: 0.5, code: 2}}]",
        "data.epochs={code: 1}",
        "data.document_masking=true",
    )
