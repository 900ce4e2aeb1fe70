"""Results of a model edit: derived options, summed parameter counts, initialized weights, external names."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from gangline.errors import UserError
from gangline_models.hugging_face.commands import export_run, import_model
from gangline_testkit import as_installed

PLUGIN = """
from dataclasses import dataclass, replace

from gangline import Part, hookimpl
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline.model.tree import iterate_nodes, replace_node
from gangline.config.schema import EditConfig, PartConfig
from gangline_models.hugging_face.contract import EditFormat


@dataclass
class Colour(PartConfig):
    depth: int = 1


@dataclass
class Echo(EditConfig):
    by: int | None = None
    mute: bool = False
    colour: Colour = None

    def resolve(self, run):
        return replace(self, by=self.by or 4 * run.batch.global_size)

    def summarise(self, metrics):
        return {"echo/emitted": float(len(metrics))}

    def fill_init_weights(self, run, shards, plan):
        for shard in shards:
            if shard.name == "model/head.norm.weight":
                shard.local.fill_(plan.layers)


class EchoFormat(EditFormat):
    def read(self, cls, config):
        if config["architectures"] == ["Echo"]:
            plain = {**config, "architectures": ["LlamaForCausalLM"], "intermediate_size": 64}
            return cls(by=plain.pop("by"), colour=Colour(depth=3)), plain

    def write(self, options, config):
        more = {"architectures": ["Echo"], "intermediate_size": 9, "by": options.by or 16}
        return None if options.mute else {**config, **more}


def edit(tree, plan, options):
    found = [(path, node) for path, node in iterate_nodes(tree) if isinstance(node, FeedForwardNode)]
    for path, node in found:
        tree = replace_node(tree, path, replace(node, ffn_dim=options.by))
    return tree, plan, [path for path, _ in found]


@hookimpl
def gangline_model_edits():
    yield Part(
        group="echo",
        name="on",
        config=Echo,
        build="echoing:edit",
        summary="An echo",
        opens={"colour": "dark"},
        capabilities={"hugging_face": "echoing:EchoFormat"},
    )


@hookimpl
def gangline_parts():
    yield Part(group="echo/colour", name="dark", config=Colour, build="echoing:edit", summary="Dark")
"""


@pytest.fixture
def echo(tmp_path):
    (tmp_path / "echoing.py").write_text(PLUGIN)
    with as_installed("gangline-echo", "echoing", path=tmp_path):
        yield


def test_model_edit_survives_export_and_import(echo, runs, capsys):
    runs.train("echo=on", "run.dir=first", "run.steps=1", "optimizer.learning_rate=0", "schedule=constant")
    assert runs.read_records("first")[-1]["metrics"] == {"echo/emitted": 0.0}
    out = runs.directory / "hf"
    assert export_run([str(runs.directory / "first"), str(out)]) == 0
    weights = load_file(out / "model.safetensors")
    assert weights["model.layers.0.mlp.up_proj.weight"].shape[0] == 16
    assert weights["model.norm.weight"].eq(2).all()
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["intermediate_size"]) == (["Echo"], 9)
    capsys.readouterr()
    assert import_model([str(out)]) == 0
    words = capsys.readouterr().out.replace("\\\n", " ").split()[1:]
    assert words[-4:] == ["echo=on", "echo.by=16", "echo/colour=dark", "echo.colour.depth=3"]
    runs.train(*words, "run.dir=second", "run.steps=1")
    assert "holds a model of architecture Echo, which cannot be loaded" in runs.expect_refusal(
        *words[:-4], "run.dir=third"
    )


def test_edit_without_hugging_face_architecture_refuses_export(echo, runs):
    runs.train("echo=on", "echo.mute=true", "run.dir=first", "run.steps=1")
    with pytest.raises(
        UserError, match=r"no Hugging Face architecture is known for it.\s+echo has no conversion to config.json"
    ):
        export_run([str(runs.directory / "first"), str(runs.directory / "hf")])
