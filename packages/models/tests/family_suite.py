"""Tests for every model family, with or without experts; a derived class lists its models in `cases`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ClassVar

import pytest
from family_cases import theirs
from family_files import Files, compare_logits, compare_there_and_back, with_one_layer_fewer
from transformers import PreTrainedModel

from gangline import UserError
from gangline_models.hugging_face.commands import list_overrides
from gangline_models.hugging_face.config import read_edited_config

Saved = Callable[[str], tuple[PreTrainedModel, Path]]  # name -> (transformers model, directory in which it is saved)


class Families:
    """Tests with an argument `family` run for each family in `cases`; families in `nightly` run nightly."""

    cases: ClassVar[Iterable[str]] = ()
    nightly: ClassVar[frozenset[str]] = frozenset()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            marks = {name: [pytest.mark.nightly] if name in self.nightly else [] for name in self.cases}
            metafunc.parametrize("family", [pytest.param(name, marks=marks[name]) for name in self.cases])


class FamilySuite(Families):
    """Each family matches transformers, and its weights and config.json survive a round trip."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, tmp_path_factory: pytest.TempPathFactory) -> Saved:
        made: dict[str, tuple[PreTrainedModel, Path]] = {}

        def save(name: str) -> tuple[PreTrainedModel, Path]:
            if name not in made:
                made[name] = theirs(name), tmp_path_factory.mktemp(name)
                model, directory = made[name]
                model.save_pretrained(directory)
            return made[name]

        return save

    def test_logits_match_transformers(self, family: str, saved: Saved) -> None:
        compare_logits(*saved(family))

    def test_export_round_trip_is_bit_exact(self, family: str, saved: Saved, tmp_path: Path) -> None:
        compare_there_and_back(*saved(family), tmp_path / "out")

    def test_an_unknown_field_is_refused_by_name(self, family: str, saved: Saved, tmp_path: Path) -> None:
        content = json.loads((saved(family)[1] / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(content | {"sandwich_multiplier": 2.0}))
        with pytest.raises(UserError, match=r"sandwich_multiplier=2\.0"):
            read_edited_config(tmp_path)

    def test_weights_with_more_layers_than_config_are_refused(self, family: str, saved: Saved, tmp_path: Path) -> None:
        directory = saved(family)[1]
        (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
        layers, content = with_one_layer_fewer(json.loads((directory / "config.json").read_text()))
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match=rf"{layers - 1} layers .* hold layer {layers - 1}, "):
            list_overrides(tmp_path)


class AbsentFields(Families):
    """An absent or null field of config.json has the default of transformers, or is refused by name."""

    def test_absent_fields_match_transformers_defaults(self, family: str, tmp_path: Path) -> None:
        wrong = Files(family, tmp_path).all_wrong()
        assert not wrong, wrong  # pytest does not explain assertions of this module


class OddFields(Families):
    """A field of config.json with an unusual value is read as transformers reads it, or is refused with a message."""

    sample: ClassVar[str] = ""  # family of the test that is not nightly
    fields: ClassVar[Iterable[tuple[str, object]]] = ()  # (field, value) of the test that is not nightly

    @pytest.mark.nightly
    def test_all_unusual_values_match_transformers_or_are_refused(self, family: str, tmp_path: Path) -> None:
        wrong = Files(family, tmp_path).all_odd_wrong()
        assert not wrong, wrong

    def test_some_unusual_values_match_transformers_or_are_refused(self, tmp_path: Path) -> None:
        files = Files(self.sample, tmp_path)
        found = {name: files.wrong_import(name, files.content | {name: value}) for name, value in self.fields}
        assert not any(found.values()), found
