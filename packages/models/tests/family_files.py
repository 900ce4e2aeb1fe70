"""Directories of small models: read as a run, written again, and read with a changed config.json.

Files saved by transformers hold every field; older and edited files lack some. If transformers and gangline read a
changed file as they read the original one, no logits are computed again.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from family_cases import LENGTH, theirs
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gangline import UserError
from gangline.batch import Batch
from gangline.config import BatchSection, Run
from gangline.config.defaults import build_default_run
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.model.init import list_shards
from gangline.plugin.registry import installed
from gangline_models.hugging_face.commands import list_overrides
from gangline_models.hugging_face.config import make_run_config_json, read_edited_config
from gangline_models.hugging_face.contract import get_model_format
from gangline_models.hugging_face.fields import HARMLESS
from gangline_models.hugging_face.names import find_hf_tensors
from gangline_models.hugging_face.read import load_pretrained
from gangline_models.hugging_face.write import export
from gangline_testkit.inputs import make_full_batch


def run_of(directory: Path) -> Run:
    """Return the run that the directory's config.json describes, with the installed edits."""
    batch = BatchSection(sequence_length=LENGTH, global_size=2)
    model, edits = read_edited_config(directory)
    return build_default_run(model=model, batch=batch, **{installed().find_part(edit).group: edit for edit in edits})


def computed(run: Run) -> dict[str, Any]:
    """Return the config.json fields of the run's model that decide what it computes, and its edits."""
    format = get_model_format(run.model)
    assert format is not None
    return format.describe(run.model) | {group: repr(edit) for group, edit in run.edits.items()}


def problems(run: Run) -> str:
    rope = getattr(run.model, "rope", None)
    found = [
        *run.model.check(run),
        *(rope.check(run) if rope else ()),
        *(problem for edit in run.edits.values() for problem in edit.check(run)),
    ]
    return "\n".join(map(str, found))


def ours(run: Run, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build the run's model with its initial weights."""
    tree, plan = compose_model(run)
    model = materialise(construct(tree), plan, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_pretrained(run.model.get_weights_directory(), list_shards(model, plan), plan)
    return model


def write(run: Run, model: torch.nn.Module, directory: Path, dtype: str = "float32") -> Path:
    _, plan = compose_model(run)
    config = make_run_config_json(run, str(directory), dtype)
    held = {shard.name.removeprefix("model/"): shard for shard in list_shards(model, plan)}
    shapes = {name: tuple(shard.global_shape) for name, shard in held.items()}
    shapes = {name: shape for name, shape in shapes.items() if find_hf_tensors(plan, name, shape)}
    arrays = ((name, held[name].local.detach()) for name in shapes)
    export(directory, arrays, plan=plan, shapes=shapes, config=config, dtype=dtype)
    return directory


def tokens(vocab_size: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    return make_full_batch(torch.randint(vocab_size, (2, LENGTH), generator=generator))


def compare_logits(model: PreTrainedModel, directory: Path) -> None:
    """Compare the logits of a saved transformers model with the logits of gangline's model from the same directory."""
    run = run_of(directory)
    assert problems(run) == ""
    batch = tokens(model.config.vocab_size)
    with torch.no_grad():
        expected, logits = model(batch.tokens).logits, ours(run).compute_logits(batch)
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))


def compare_there_and_back(model: PreTrainedModel, directory: Path, out: Path) -> None:
    """Import the directory, export to `out`, and check that tensors, fields and logits in transformers are the same."""
    run = run_of(directory)
    write(run, ours(run), out)
    before, after = load_file(directory / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert computed(run_of(out)) == computed(run)
    batch = tokens(model.config.vocab_size)
    opened, first = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        for path in (out, directory)
    )
    assert type(opened) is type(model)
    with torch.no_grad():
        assert torch.equal(opened(batch.tokens).logits, first(batch.tokens).logits)


def with_one_layer_fewer(content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the number of layers in a config.json, and the config.json of a model without the last layer."""
    count = "n_layer" if "n_layer" in content else "num_hidden_layers"
    lists = {name: content[name][:-1] for name in ("layer_types", "no_rope_layers") if content.get(name)}
    return content[count], content | lists | {count: content[count] - 1}


DECIDING_ALSO = {"max_position_embeddings"}  # matters if rotary positions are scaled
GONE = object()
ODD = (
    *(0, -1, None, "x", 10**9, 2**62, 10**400, 0.0, 1.5, 1e308, math.nan, 1, True, False),
    *("", [], {}, [None], [1, 2]),
)


def places(content: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field that matters, including fields inside of rope_parameters."""
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
    """Yield (field, file without the field or with null), for the file and for its form in older versions."""
    rope = dict(content.get("rope_parameters") or {})
    older = [content]
    if "layer_types" in content:  # older files rely on the class's default
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
    """One saved model that is read again and again with another config.json."""

    def __init__(self, name: str, directory: Path) -> None:
        self.model = theirs(name)
        self.directory = directory
        self.model.save_pretrained(directory)
        self.content = json.loads((directory / "config.json").read_text())
        self.batch = tokens(self.model.config.vocab_size)
        self.read = computed(run_of(directory))
        self.known = self._config()

    def _config(self) -> dict[str, Any]:
        return AutoConfig.from_pretrained(self.directory).to_dict()

    def their_logits(self) -> torch.Tensor | None:
        """Return the logits of transformers; None if it refuses the file or if the file lacks weights."""
        try:
            model, how = AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            with torch.no_grad():
                found: torch.Tensor = model.eval()(self.batch.tokens).logits
        except Exception:  # transformers raises errors of any class
            return None
        return None if how["missing_keys"] or how["mismatched_keys"] or not found.isfinite().all() else found

    def wrong(self, field: str, content: dict[str, Any]) -> str | None:
        """Return the error in how gangline reads that file, or None."""
        (self.directory / "config.json").write_text(json.dumps(content))
        try:
            run = run_of(self.directory)
            said = problems(run)
        except UserError as error:
            run, said = None, str(error)
        if said:
            named = field in said
            return None if named or self.their_logits() is None else f"refused without its name: {said}"
        assert run is not None
        try:
            if computed(run) == self.read and self._config() == self.known:
                return None
        except Exception:  # transformers refuses it
            return None
        if (expected := self.their_logits()) is None:
            return None
        try:
            model = ours(run)
        except UserError:  # the weights contradict the file, and transformers does not check that
            return None
        with torch.no_grad():
            gap = (model.compute_logits(self.batch) - expected).abs().max()
        # A field that matters changes logits by 1e-2 or more. The default epsilon of a norm may be 1000 times smaller
        # than the saved one: rounding errors are then ten times larger, in transformers and in gangline (each against
        # float64).
        return None if gap < 1e-4 * max(1.0, float(expected.abs().max())) else f"logits differ by {float(gap)}"

    def wrong_import(self, field: str, content: dict[str, Any]) -> str | None:
        """Return the error in how `gangline import` and a run read that file.

        Raises errors of the import that are not UserError.
        """
        (self.directory / "config.json").write_text(json.dumps(content))
        with suppress(UserError):
            list_overrides(self.directory)
        return self.wrong(field, content)

    def all_odd_wrong(self) -> dict[str, str]:
        """Return the errors of all fields that are misread with a value of another type or size."""
        found = {}
        for path in places(self.content):
            for value in ODD:
                try:
                    wrong = self.wrong_import(path[-1], changed(self.content, path, value))
                except Exception as error:  # reported with the value that causes it
                    wrong = repr(error)
                if wrong:
                    found[f"{'.'.join(path)}={value!r:.20}"] = wrong
        return found

    def all_wrong(self) -> dict[str, str]:
        """Return the errors of all fields that are misread if they are absent or null."""
        found = {}
        for field, content in files(self.content):
            if wrong := self.wrong(field, content):
                found[field] = wrong
        return found
