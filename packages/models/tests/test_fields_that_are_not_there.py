"""A field of config.json that is absent or null means what it means to transformers, or is refused by its name.

What transformers saves holds every field; older and edited files do not. Where the file is read as it was before, by
them and by us, nothing is computed again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES, theirs
from test_families import ours, run_of, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from gangline import UserError
from gangline_models.hugging_face.config_reader import HARMLESS

DECIDING_ALSO = {"max_position_embeddings"}  # where rotary positions are stretched
GONE = object()


def places(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The path of every field, those inside of rope_parameters too."""
    for name, value in content.items():
        if name in HARMLESS - DECIDING_ALSO:
            continue
        yield (name,)
        if name == "rope_parameters":
            for key, inner in value.items():
                yield (name, key)
                if isinstance(inner, dict):
                    yield from ((name, key, leaf) for leaf in inner)


def changed(content: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(content)
    at = found
    for name in path[:-1]:
        at = at[name]
    if value is GONE:
        at.pop(path[-1], None)
    else:
        at[path[-1]] = value
    return found


def files(content: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(the field, the file without it or with null), of the file and of one as older versions wrote it."""
    rope = dict(content.get("rope_parameters") or {})
    older = [content]
    if "layer_types" in content:  # older files leave it to the class
        older.append(changed(content, ("layer_types",), GONE))
    if "rope_theta" in rope:
        flat = changed(content, ("rope_parameters",), GONE)
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        older.append(flat | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling})
    for base in older:
        for path in places(base):
            for value in (GONE, None):
                yield path[-1], changed(base, path, value)
    for part in [("rope_parameters",), ("rope_parameters", "full_attention")]:
        if "rope_theta" in (rope if len(part) == 1 else rope.get(part[1], {})):
            yield "partial_rotary_factor", changed(content, (*part, "partial_rotary_factor"), 0.34)
            yield "partial_rotary_factor", changed(content, ("partial_rotary_factor",), 0.34)


class Files:
    """One model, read again and again with another config.json beside the same weights."""

    def __init__(self, name: str, directory: Path) -> None:
        self.model = theirs(name)
        self.directory = directory
        self.model.save_pretrained(directory)
        self.content = json.loads((directory / "config.json").read_text())
        self.batch = tokens(self.model.config.vocab_size)
        self.read = run_of(directory).model.computed()
        self.known = self._config()

    def _config(self) -> dict[str, Any]:
        return AutoConfig.from_pretrained(self.directory).to_dict()

    def their_logits(self) -> torch.Tensor | None:
        """None: they refuse the file, or begin with weights that it does not hold."""
        try:
            model, how = AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            with torch.no_grad():
                found: torch.Tensor = model.eval()(self.batch.tokens).logits
        except Exception:  # whatever they raise
            return None
        return None if how["missing_keys"] or how["mismatched_keys"] or not found.isfinite().all() else found

    def wrong(self, field: str, content: dict[str, Any]) -> str | None:
        """What is wrong with how we read that file."""
        (self.directory / "config.json").write_text(json.dumps(content))
        try:
            run = run_of(self.directory)
            said = "\n".join(map(str, run.model.check(run)))
        except UserError as error:
            run, said = None, str(error)
        if said:
            named = field in said
            return None if named or self.their_logits() is None else f"refused without its name: {said}"
        assert run is not None
        try:
            if run.model.computed() == self.read and self._config() == self.known:
                return None
        except Exception:  # they refuse it
            return None
        if (expected := self.their_logits()) is None:
            return None
        with torch.no_grad():
            gap = (ours(run).logits(self.batch) - expected).abs().max()
        return None if gap < 1e-5 * max(1.0, float(expected.abs().max())) else f"logits differ by {float(gap)}"


NIGHTLY = {"qwen2", "qwen2-dynamic", "olmo2-mha-tied", "olmo3", "phi3-partial", "phi3-longrope-short"}  # others say it


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in CASES]
)
def test_what_is_absent_or_null_is_what_transformers_has_for_it(name, tmp_path):
    case = Files(name, tmp_path)
    found = {}
    for field, content in files(case.content):
        if wrong := case.wrong(field, content):
            found[field] = wrong
    assert found == {}
