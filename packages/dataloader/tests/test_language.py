"""`--language`: documents in other languages are dropped and counted by language."""

from __future__ import annotations

import json

import pytest

from gangline.errors import UserError
from gangline_dataloader import commands
from gangline_dataloader.prepare.language import check_language
from gangline_dataloader.prepare.rule import Dropped
from gangline_dataloader.prepare.settings import Settings
from gangline_dataloader.store.manifest import read

TEXTS = {
    "en": "The harbour was quiet in the morning, and the boats lay still between the stones of the old pier.",
    "de": "Der Hafen war am Morgen still, und die Boote lagen ruhig zwischen den Steinen der alten Mole.",
    "fr": "Le port était calme le matin, et les bateaux reposaient entre les pierres de la vieille jetée.",
    "ja": "朝の港は静かで、古い桟橋の石の間に船が静かに横たわっていた。",
}


def test_other_languages_are_dropped_and_counted(tmp_path, capsys):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS.values()))
    out = tmp_path / "store"
    assert commands.main(["prepare", str(texts), "--out", str(out), "--language", "en,fr", "--validation", "0"]) == 0
    count = read(out).report["by_source"][str(texts)]
    assert (count["kept"], count["dropped"]) == (2, {"language: de": 1, "language: ja": 1})
    assert "1 dropped: language: de" in capsys.readouterr().out


def test_confidence_option_sets_language_threshold(make_store, tmp_path):
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "code.txt").write_text("x = 1")
    (folder / "text.txt").write_text(TEXTS["en"])
    store = make_store(folder, languages=("en",), confidence=0.9, validation=0)
    count = read(store).report["by_source"][str(folder)]
    assert count["kept"] == 1
    assert sum(count["dropped"].values()) == 1


def test_unknown_language_is_refused():
    with pytest.raises(UserError, match=r"unknown language english.*\n.*ISO 639 codes: .*de, .*en"):
        Settings(languages=("english",)).check()
    with pytest.raises(UserError, match=r"--confidence 1.5 must be between 0 and 1"):
        Settings(languages=("en",), confidence=1.5).check()


@pytest.mark.parametrize("text", ["ok", "1234", "Guten Tag", "The cat sat.", "\N{GRINNING FACE}", "", "a" * 100])
def test_short_text_is_dropped_as_unsure(text):
    assert check_language(text, ("en", "de"), 0.5) == Dropped("language: unsure")
