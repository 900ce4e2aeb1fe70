"""Import and export of Hugging Face weights, with the logits of transformers."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gangline.config.compose import compose_one
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.model.adapter import Adapter
from gangline.model.build import construct, materialise
from gangline.model.init import list_shards, make_whole_model
from gangline.model.tree import get_parameter_shapes
from gangline.plan import HFName, Plan
from gangline.shard import Shard
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.presets import PRESETS
from gangline_models.families.decoder import choose_architecture, make_config_json
from gangline_models.families.decoder_window import read_window
from gangline_models.hugging_face.adapters import write_apart
from gangline_models.hugging_face.commands import export_run, import_model
from gangline_models.hugging_face.config import check_weights, read_model_config
from gangline_models.hugging_face.names import find_hf_tensors
from gangline_models.hugging_face.read import load_pretrained
from gangline_models.hugging_face.write import export

LLAMA = DecoderConfig(vocab_size=97, dim=32, layers=3, heads=4, kv_heads=2, ffn_dim=48)
CASES = {
    "llama": LLAMA,
    "llama-mha": replace(LLAMA, kv_heads=None),
    "llama-tied": replace(LLAMA, tied=True),
    "llama3-rope": replace(
        LLAMA, rope_theta=500_000.0, rope_scaling_factor=8.0, rope_original_max_position=64, head_dim=16
    ),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=16, norm_eps=1e-6, rope_theta=1_000_000.0),
    "qwen3-tied": replace(LLAMA, qk_norm=True, head_dim=16, tied=True),
    "mistral": replace(LLAMA, window=7),
    "qwen3-windows": replace(LLAMA, qk_norm=True, head_dim=16, window=5, full_every=2),
}


def randomised(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build a model with random weights, including norms, large enough that every part affects the output."""
    tree, plan = plan_decoder(replace(config, init_std=0.15))
    model = make_whole_model(tree, plan, seed=0, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return model


def write(directory: Path, config: DecoderConfig, model: torch.nn.Module, **options) -> Path:
    tree, plan = plan_decoder(config)
    shapes = get_parameter_shapes(tree)
    export(
        directory,
        ((name, p.detach()) for name, p in model.named_parameters()),
        plan=plan,
        shapes=shapes,
        config=make_config_json(config, dtype=options.get("dtype", "float32")),
        **options,
    )
    return directory


def read(directory: Path, config: DecoderConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    tree, plan = plan_decoder(config)
    model = materialise(construct(tree), plan, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_pretrained(directory, list_shards(model, plan), plan)
    return model


@pytest.mark.parametrize("name", CASES)
def test_exported_model_has_same_logits_in_transformers(name, tmp_path, random_batch):
    config, batch = CASES[name], random_batch(2, 96, 97)
    ours = randomised(config)
    theirs = AutoModelForCausalLM.from_pretrained(write(tmp_path / "out", config, ours), dtype=torch.float32)
    assert type(theirs).__name__ == choose_architecture(config)
    with torch.no_grad():
        expected, logits = theirs(batch.tokens).logits, ours.compute_logits(batch)
    assert logits.std() > 0.1
    assert (logits - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_imported_transformers_model_has_same_logits(name, tmp_path, random_batch):
    config, batch = CASES[name], random_batch(2, 96, 97)
    torch.manual_seed(0)
    values = make_config_json(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    assert type(theirs).__name__ == choose_architecture(config)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    found = read_model_config(tmp_path)
    filled = replace(config, kv_heads=config.key_heads, head_dim=config.head_width, weights=str(tmp_path))
    assert found == filled
    assert found.check(build_default_run()) == []
    with torch.no_grad():
        assert (read(tmp_path, found).compute_logits(batch) - theirs(batch.tokens).logits).abs().max() < 1e-5


def test_document_boundaries_match_transformers_attention_mask(tmp_path, random_batch):
    config, batch = CASES["qwen3"], random_batch(2, 40, 97, documents=3)
    ours = randomised(config)
    theirs = AutoModelForCausalLM.from_pretrained(write(tmp_path / "out", config, ours), dtype=torch.float32)
    same = batch.document[:, None, :, None] == batch.document[:, None, None, :]
    mask = torch.zeros(same.shape).masked_fill(~same.tril(), torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = theirs(batch.tokens, position_ids=batch.position, attention_mask=mask).logits
        assert (ours.compute_logits(batch) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 20_000, 1])
def test_export_round_trip_is_bit_exact(dtype, max_shard_bytes, tmp_path):
    config, torch_dtype = CASES["qwen3"], getattr(torch, dtype)
    model = randomised(config, torch_dtype)
    first = write(tmp_path / "one", config, model, dtype=dtype, max_shard_bytes=max_shard_bytes)
    again = read(first, config, torch_dtype)
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    second = write(tmp_path / "two", config, again, dtype=dtype, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    assert len(files) == {5_000_000_000: 2, 1: 36 + 2}.get(max_shard_bytes, len(files))


def test_exported_file_is_read_by_safetensors(tmp_path):
    config = CASES["llama"]
    model = randomised(config)
    out = write(tmp_path / "out", config, model)
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["model.layers.2.self_attn.q_proj.weight"], model.blocks[2].attention.wq.weight)
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert load_file(tmp_path / "theirs.safetensors").keys() == tensors.keys()
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_index_lists_file_of_every_tensor(tmp_path):
    out = write(tmp_path / "out", CASES["llama"], randomised(CASES["llama"]), max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert sorted(set(index["weight_map"].values())) == files
    for name in files:
        tensors = load_file(out / name)
        assert {key for key, file in index["weight_map"].items() if file == name} == set(tensors)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= 20_000
    total = sum(x.nbytes for name in files for x in load_file(out / name).values())
    assert index["metadata"]["total_size"] == total


def test_rank_reads_only_its_shard(tmp_path, monkeypatch):
    config = CASES["llama"]
    model = randomised(config)
    write(tmp_path / "out", config, model)
    _, plan = plan_decoder(config)
    weight = model.blocks[1].attention.wq.weight
    local = torch.empty(8, 16)
    read_boxes = []
    from gangline_models.hugging_face.tensors import Tensors

    blocks = Tensors.iterate_blocks
    monkeypatch.setattr(Tensors, "iterate_blocks", lambda *given: read_boxes.append(given[2]) or blocks(*given))
    load_pretrained(
        tmp_path / "out",
        [Shard("model/blocks.1.attention.wq.weight", (32, 32), torch.float32, (16, 16), local)],
        plan,
    )
    assert torch.equal(local, weight[16:24, 16:32])
    assert read_boxes == [(slice(16, 24), slice(16, 32))]


@pytest.mark.parametrize("block_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((9, 7), (slice(2, 8), slice(0, 7))),
        ((9, 7), (slice(1, 9, 3), slice(2, 6, 2))),
        ((5, 4, 6), (slice(1, 4), slice(1, 3), slice(0, 5, 2))),
        ((13,), (slice(3, 11),)),
        ((6, 3), (slice(2, 2), slice(0, 3))),
        ((), ()),
    ],
)
def test_shard_is_read_in_bounded_row_blocks(shape, box, dtype, block_bytes, tmp_path, monkeypatch):
    from gangline_models.hugging_face import tensor_file

    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block_bytes)
    whole = torch.randn(shape).to(dtype)
    save_file({"before": torch.ones(3), "a": whole}, tmp_path / "x.safetensors")
    file = tensor_file.TensorFile(tmp_path / "x.safetensors")
    want = whole[box]
    found, rows = torch.full_like(want, torch.nan), 0
    for first, part in file.iterate_blocks("a", box):
        (found[first : first + len(part)] if shape else found).copy_(part)
        rows = max(rows, len(part) if shape else 1)
    assert torch.equal(found, want)
    assert rows == 1 or rows * (whole[0] if shape else whole).nbytes <= block_bytes
    file.close()


def test_unsupported_tensor_dtype_is_refused(tmp_path):
    from gangline_models.hugging_face.tensor_file import TensorFile

    save_file({"scales": torch.ones(4, dtype=torch.complex64)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"scales has dtype C64, which is not supported"):
        list(TensorFile(tmp_path / "x.safetensors").iterate_blocks("scales", (slice(0, 4),)))


def test_shard_is_filled_before_generator_resumes():
    from gangline_models.hugging_face import read

    filled, seen = set(), []

    def shards():
        for number in range(40):
            yield number
            seen.append(number in filled)

    def fill(shard):
        sleep(0.0005)
        filled.add(shard)

    read.fill_each(fill, shards())
    assert seen == [True] * 40


def test_each_listed_shard_is_filled_once():
    from gangline_models.hugging_face import read

    filled = []

    def fill(shard):
        sleep(0.0005)  # lets the other thread run, as reading does
        filled.append(shard)

    read.fill_each(fill, [*range(40)])
    assert sorted(filled) == [*range(40)]


def test_failed_shard_fill_stops_remaining_fills():
    from gangline_models.hugging_face import read

    def fill(shard):
        if shard == 3:
            raise UserError("it cannot be read.")
        begun.append(shard)
        sleep(0.001)

    begun = []
    with pytest.raises(UserError, match="it cannot be read"):
        read.fill_each(fill, [*range(1000)])
    assert len(begun) < 1000


@pytest.mark.parametrize("how", ["same", "transpose"])
def test_several_parameters_map_to_one_fused_tensor(how, tmp_path):
    rules = [HFName(name, "joined.w", how, rows=(first, 9)) for name, first in (("q", 0), ("k", 4), ("v", 7))]
    shapes = {"v": (2, 5), "q": (4, 5), "k": (3, 5)}
    plan = Plan("e", "b", "h", 1, names=tuple(rules))
    arrays = {name: torch.randn(shape) for name, shape in shapes.items()}
    export(tmp_path / "out", arrays.items(), plan=plan, shapes=shapes, config={})
    whole = torch.cat([arrays[name] for name in "qkv"])
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["joined.w"], whole if how == "same" else whole.T)
    local = torch.empty(2, 3)  # a slice of k
    load_pretrained(tmp_path / "out", [Shard("model/k", (3, 5), torch.float32, (1, 2), local)], plan)
    assert torch.equal(local, arrays["k"][1:3, 2:5])


def test_expert_stacks_map_to_interleaved_columns(tmp_path):
    """Check one transposed Hugging Face tensor whose columns alternate between gate and up of all experts."""
    both = {"rows": (0, 8), "every": 2, "dim": 1}
    rules = [HFName("gate", "joined.w", "transpose", **both), HFName("gate_bias", "joined.b", **both)]
    rules += [HFName(n.pattern.replace("gate", "up"), n.hf_name, n.how, (1, 8), 2, 1) for n in rules]
    shapes = {"up_bias": (3, 4), "gate": (3, 4, 5), "up": (3, 4, 5), "gate_bias": (3, 4)}
    plan = Plan("e", "b", "h", 1, names=tuple(rules))
    arrays = {name: torch.randn(shape) for name, shape in shapes.items()}
    export(tmp_path / "out", arrays.items(), plan=plan, shapes=shapes, config={})
    theirs = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(theirs["joined.w"][..., 1::2], arrays["up"].mT)
    assert torch.equal(theirs["joined.b"][..., ::2], arrays["gate_bias"])
    boxes = [("up", (1, 1, 2), (2, 3, 3)), ("gate", (0, 0, 0), (3, 4, 5)), ("up_bias", (2, 3), (1, 1))]
    for name, offset, local in boxes:
        shard = Shard(f"model/{name}", shapes[name], torch.float32, offset, torch.empty(local))
        load_pretrained(tmp_path / "out", [shard], plan)
        assert torch.equal(shard.local, arrays[name][shard.box.slices]), name


class TestNamesThatLieOtherwise:
    """Tensors transposed, or stacked in gangline: a plan may declare them, and the decoder does not need them."""

    PLAN = Plan(
        "e",
        "b",
        "h",
        1,
        names=(HFName("up", "up.{n}.w", "stack"), HFName("down", "down.w", "transpose"), HFName("one", "one")),
    )
    SHAPES = {"up": (3, 4, 5), "down": (6, 7), "one": (2,)}

    def test_stacked_and_transposed_names_round_trip(self, tmp_path):
        arrays = {name: torch.randn(shape) for name, shape in self.SHAPES.items()}
        export(tmp_path / "out", arrays.items(), plan=self.PLAN, shapes=self.SHAPES, config={})
        theirs = load_file(tmp_path / "out" / "model.safetensors")
        assert theirs.keys() == {"up.0.w", "up.1.w", "up.2.w", "down.w", "one"}
        assert torch.equal(theirs["up.1.w"], arrays["up"][1])
        assert torch.equal(theirs["down.w"], arrays["down"].T)
        boxes = [
            ("up", (1, 0, 2), (2, 4, 3)),
            ("up", (0, 1, 0), (2, 3, 5)),
            ("down", (2, 1), (4, 5)),
            ("one", (1,), (1,)),
        ]
        shards = [
            Shard(f"model/{name}", self.SHAPES[name], torch.float32, offset, torch.empty(local))
            for name, offset, local in boxes
        ]
        load_pretrained(tmp_path / "out", shards, self.PLAN)
        for shard in shards:
            name = shard.name.removeprefix("model/")
            assert torch.equal(shard.local, arrays[name][shard.box.slices]), name

    def test_export_copies_arrays_from_reused_buffer(self, tmp_path):
        """Pass arrays from one buffer, as a checkpoint reader does: arrays that wait for others must be copied."""
        plan = Plan("e", "b", "h", 1, names=(HFName("q", "qkv", rows=(0, 5)), HFName("k", "qkv", rows=(3, 5))))
        shapes = {"q": (3, 4), "k": (2, 4)}
        wanted = {name: torch.randn(shape) for name, shape in shapes.items()}

        def arrays(asked):
            memory = torch.empty(12)
            for name, shape in asked.items():
                yield name, memory[: wanted[name].numel()].view(shape).copy_(wanted[name])

        export(tmp_path / "out", arrays(shapes), plan=plan, shapes=shapes, config={})
        theirs = load_file(tmp_path / "out" / "model.safetensors")
        assert torch.equal(theirs["qkv"], torch.cat((wanted["q"], wanted["k"])))
        write_apart(tmp_path / "apart", Adapter({"q": "a", "k": "b"}), arrays, shapes, "float32")
        theirs = load_file(tmp_path / "apart" / "adapter_model.safetensors")
        assert torch.equal(theirs["a"], wanted["q"])
        assert torch.equal(theirs["b"], wanted["k"])

    def test_parameter_without_hugging_face_name_is_refused(self):
        with pytest.raises(UserError, match="no Hugging Face name for parameter 'x'"):
            find_hf_tensors(self.PLAN, "x", (1,))


@pytest.mark.parametrize("part", ["llama3-1b", "llama3-8b", "qwen3-0.6b", "qwen3-8b"])
def test_preset_config_survives_round_trip(part, tmp_path):
    config = PRESETS[part]()
    (tmp_path / "config.json").write_text(json.dumps(make_config_json(config)))
    found = read_model_config(tmp_path)
    assert replace(config, kv_heads=config.key_heads, head_dim=config.head_width, weights=str(tmp_path)).__dict__ == {
        **found.__dict__
    }


@pytest.mark.parametrize("part", ["llama3-1b", "qwen3-0.6b"])
def test_unknown_config_field_is_refused_by_name(part, tmp_path):
    content = make_config_json(PRESETS[part]()) | {"bos_token_id": 1, "_name_or_path": "x", "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(content))
    read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content | {"residual_multiplier": 0.5, "logits_scaling": None}))
    with pytest.raises(UserError, match=r"residual_multiplier=0\.5\."):
        read_model_config(tmp_path)


def without(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    """Remove a tensor from the file that the index lists for it, or change the tensor there."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    path = directory / weight_map[name]
    tensors = load_file(path)
    tensors |= {name: change(tensors[name])} if change else {}
    save_file({key: tensor for key, tensor in tensors.items() if key != name or change}, path)


def add(directory: Path, name: str) -> None:
    """Write a tensor of that name into the directory's last file, and into the index."""
    path, index = last(directory), directory / "model.safetensors.index.json"
    save_file(load_file(path) | {name: torch.ones(4)}, path)
    content = json.loads(index.read_text())
    content["weight_map"][name] = path.name
    index.write_text(json.dumps(content))


def copied(directory: Path) -> None:
    """Write a tensor of the first file, with other values, also into the last file; the index does not change."""
    tensor = "model.embed_tokens.weight"
    save_file(load_file(last(directory)) | {tensor: torch.ones(97, 32)}, last(directory))


def piped(directory: Path) -> None:
    path = last(directory)
    path.unlink()
    os.mkfifo(path)


def no_weights(directory: Path) -> str:
    for path in directory.glob("model*"):
        path.unlink()
    (directory / "pytorch_model.bin").touch()
    return "pytorch_model.bin is not read"


def two_sets(directory: Path) -> str:
    save_file({"model.norm.weight": torch.zeros(32)}, directory / "model.safetensors")
    return "has weights twice"


def fault(words: str, does: Callable[[Path], object]) -> Callable[[Path], str]:
    return lambda directory: (does(directory), words)[1]


def last(directory: Path) -> Path:
    return max(directory.glob("*.safetensors"))


BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
DOWN = "model.layers.2.mlp.down_proj.weight"
FAULTS: dict[str, Callable[[Path], str]] = {
    "no weights": no_weights,
    "two sets": two_sets,
    "a missing file": fault("is missing", lambda directory: last(directory).unlink()),
    "a short file": fault(
        "cannot be read", lambda directory: last(directory).write_bytes(last(directory).read_bytes()[:-5])
    ),
    "an empty file": fault("cannot be read", lambda directory: last(directory).write_bytes(b"")),
    "a damaged index": fault(
        "is damaged", lambda directory: (directory / "model.safetensors.index.json").write_text("[]")
    ),
    "an index without names of files": fault(
        "is damaged",
        lambda directory: (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3}}'),
    ),
    "an index with another directory": fault(
        "outside its directory: '../hf/model.safetensors'",
        lambda directory: (directory / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../hf/model.safetensors"}}'
        ),
    ),
    "an index with an absolute path": fault(
        "outside its directory: '/etc/passwd'",
        lambda directory: (directory / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "/etc/passwd"}}'
        ),
    ),
    "a pointer": fault(
        "Git LFS has not downloaded the file",
        lambda directory: last(directory).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ),
    "a tensor that is not in its file": fault(
        f"the tensor {DOWN} is missing in", lambda directory: without(directory, DOWN)
    ),
    "a layer behind the last": fault(
        "3 layers (num_hidden_layers or n_layer); the files hold layer 7",
        lambda directory: add(directory, "model.layers.7.self_attn.q_proj.weight"),
    ),
    "a tensor in two files": fault("has the tensor model.embed_tokens.weight twice", copied),
    "another shape": fault(
        f"{DOWN} has shape (32, 47)", lambda directory: without(directory, DOWN, lambda w: w[:, :47].contiguous())
    ),
    "numbers that are not read": fault(
        "has dtype C64", lambda directory: without(directory, DOWN, lambda w: w.to(torch.complex64))
    ),
    "whole numbers": fault(
        f"{DOWN} holds values of dtype int32", lambda directory: without(directory, DOWN, lambda w: w.view(torch.int32))
    ),
    "a pipe": fault("The path is not a regular file", piped),
}


class TestRefusals:
    @pytest.fixture
    def directory(self, tmp_path):
        return write(tmp_path / "hf", CASES["llama"], randomised(CASES["llama"]), max_shard_bytes=20_000)

    def change(self, directory: Path, **values) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    def error(self, function, *arguments) -> str:
        with pytest.raises(UserError) as caught:
            function(*arguments)
        return str(caught.value)

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (
                {"architectures": ["MambaForCausalLM"]},
                ["MambaForCausalLM", "LlamaForCausalLM, MistralForCausalLM, Qwen3ForCausalLM"],
            ),
            ({"architectures": None}, ["architecture None"]),
            ({"attention_bias": True}, ["attention_bias=True"]),
            ({"hidden_act": "gelu"}, ["hidden_act=gelu"]),
            (
                {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
                ["unsupported rope_type=yarn", "default and llama3"],
            ),
            (
                {"layer_types": ["full_attention", "sliding_attention"]},
                ["a Llama model with unsupported sliding windows"],
            ),
            ({"hidden_size": None, "num_key_value_heads": None}, ["lacks hidden_size, num_key_value_heads"]),
        ],
    )
    def test_unsupported_model_config_is_refused(self, directory, values, words):
        self.change(directory, **values)
        text = self.error(read_model_config, directory)
        assert all(word in text for word in words), text

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"soft_cap": 30.0, "sinks": True}, ["model.soft_cap, model.sinks"]),
            ({"attention_scale": 0.1}, ["model.attention_scale"]),
            ({"window": 8, "full_every": 2}, ["model.full_every=2", "Mistral"]),
        ],
    )
    def test_export_refuses_options_unsupported_by_transformers(self, options, words):
        text = self.error(make_config_json, replace(LLAMA, **options))
        assert all(word in text for word in words), text
        assert "z_loss" not in make_config_json(replace(LLAMA, z_loss=1e-4))

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
    def test_import_refuses_named_pipe(self, directory, name):
        (directory / name).unlink()
        os.mkfifo(directory / name)
        assert "a named pipe, not a regular file" in self.error(import_model, [str(directory)])

    def test_sliding_window_defaults_match_transformers(self):
        of = lambda name, **more: read_window("there", {"architectures": [name], **more}, 4)  # noqa: E731
        assert of("MistralForCausalLM") == {"window": 4096}
        assert of("MistralForCausalLM", sliding_window=None) == {"window": None}
        assert of("Qwen3ForCausalLM") == of("Qwen3ForCausalLM", use_sliding_window=True) == {}
        assert of("Qwen3ForCausalLM", use_sliding_window=True, max_window_layers=0)["window"] == 4096
        two = {"use_sliding_window": True, "max_window_layers": 2}
        assert "unsupported pattern of sliding windows" in self.error(lambda: of("Qwen3ForCausalLM", **two))
        lying = {"layer_types": ["sliding_attention"] * 4}
        assert "Without a sliding window in use" in self.error(lambda: of("Qwen3ForCausalLM", **lying))

    def test_mistral_layer_types_must_match_sliding_window(self):
        of = lambda **more: read_window("there", {"architectures": ["MistralForCausalLM"], **more}, 2)  # noqa: E731
        full, sliding = "full_attention", "sliding_attention"
        for types in ([full, full], [sliding, full]):
            assert "layer_types" in self.error(lambda types=types: of(sliding_window=8, layer_types=types))
        assert "layer_types" in self.error(lambda: of(sliding_window=None, layer_types=[sliding, sliding]))
        assert of(sliding_window=8, layer_types=[sliding, sliding]) == {"window": 8}
        assert of(sliding_window=None, layer_types=[full, full]) == {"window": None}

    def test_tied_model_with_different_head_is_refused(self, tmp_path):
        untied = replace(CASES["llama"], tied=False)
        model = randomised(untied)
        write(tmp_path / "other", untied, model)
        with torch.no_grad():
            model.head.weight.copy_(model.embed.weight)
        write(tmp_path / "copy", untied, model)
        for name in ("other", "copy"):
            self.change(tmp_path / name, tie_word_embeddings=True)
        tied = read_model_config(tmp_path / "copy")
        assert tied.tied
        assert torch.equal(read(tmp_path / "copy", tied).embed.weight, model.embed.weight)
        said = self.error(read, tmp_path / "other", tied)
        assert "lm_head.weight differs from model.embed_tokens.weight" in said
        assert "tie_word_embeddings to false" in said

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ({"rope_theta": 0}, ["rope_theta=0", "more than 0"]),
            ({"rope_theta": "x"}, ['rope_theta="x"', "a number"]),
            ({"rope_theta": 10**400}, ["rope_theta=1000", "less than 2^63"]),
            ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "at least 1"]),
            ({"num_hidden_layers": "2"}, ['num_hidden_layers="2"', "an integer"]),
            ({"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "30 tensors"]),
            ({"hidden_size": -32}, ["hidden_size=-32", "at least 1"]),
            ({"hidden_size": 32.0}, ["hidden_size=32.0", "an integer"]),
            ({"rms_norm_eps": math.nan}, ["rms_norm_eps=NaN", "finite"]),
            ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "true or false"]),
            ({"vocab_size": 10**12}, ["describes a model of", "vocab_size"]),
            ({"num_key_value_heads": 3}, ["kv_heads=3 does not divide"]),
            ({"architectures": "LlamaForCausalLM"}, ["architectures=", "a list"]),
            ({"layer_types": {"0": 1}}, ["layer_types=", "a list"]),
            ({"rope_scaling": "llama3"}, ["rope_scaling=", "a mapping"]),
            ({"rope_parameters": []}, ["rope_parameters=", "a mapping"]),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 0, **BANDS}}, ["factor=0", "at least 1"]),
            ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, ["sliding_window=0", "at least 1"]),
        ],
    )
    def test_invalid_config_json_field_is_refused(self, directory, values, words):
        self.change(directory, **values)
        text = self.error(import_model, [str(directory)])
        assert all(word in text for word in words), text

    def test_deeply_nested_config_json_is_refused(self, directory):
        (directory / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
        assert "nested too deeply" in self.error(read_model_config, directory)

    def test_missing_or_damaged_config_json_is_refused(self, directory, tmp_path):
        assert "config.json" in self.error(read_model_config, tmp_path / "nowhere")
        (directory / "config.json").write_text("{")
        assert "cannot be read" in self.error(read_model_config, directory)

    def test_weights_of_a_different_model_are_refused(self, directory):
        config = replace(CASES["llama"], layers=4, kv_heads=4, weights=str(directory))
        problems = check_weights(build_default_run(model=config))
        text = str(UserError.of(problems))
        assert "layers is 3 in the directory and 4 in the run" in text
        assert "kv_heads is 2 in the directory and 4 in the run" in text
        assert f"gangline import {directory}" in text

    def test_missing_tensor_is_refused(self, directory):
        index = directory / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        del content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
        index.write_text(json.dumps(content))
        assert "the tensor model.layers.1.mlp.up_proj.weight is missing" in self.error(read, directory, CASES["llama"])

    def test_missing_weight_file_is_refused(self, directory):
        (directory / "model-00002-of-00007.safetensors").unlink(missing_ok=True)
        first = min(directory.glob("*.safetensors"))
        first.unlink()
        assert f"{first.name} is missing" in self.error(read, directory, CASES["llama"])

    def test_damaged_weight_file_or_index_is_refused(self, directory):
        for path in directory.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-5])
        assert "cannot be read" in self.error(read, directory, CASES["llama"])
        (directory / "model.safetensors.index.json").write_text("[]")
        assert "damaged" in self.error(read, directory, CASES["llama"])

    def test_directory_without_weights_is_refused(self, directory):
        for path in directory.glob("model*"):
            path.unlink()
        assert "has no weights" in self.error(read, directory, CASES["llama"])

    def test_tensor_of_different_shape_is_refused(self, directory):
        text = self.error(read, directory, replace(CASES["llama"], ffn_dim=40))
        assert "(48, 32)" in text
        assert "(40, 32)" in text

    def test_unexpected_tensor_is_refused(self, tmp_path):
        write(tmp_path / "hf", CASES["qwen3"], randomised(CASES["qwen3"]))
        text = self.error(read, tmp_path / "hf", replace(CASES["qwen3"], qk_norm=False))
        assert "match no parameter of this model" in text
        assert "self_attn.q_norm.weight" in text

    def test_rotary_buffer_in_weight_file_is_skipped(self, tmp_path):
        out = write(tmp_path / "hf", CASES["llama"], randomised(CASES["llama"]))
        tensors = load_file(out / "model.safetensors")
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(tensors, out / "model.safetensors")
        read(out, CASES["llama"])

    @pytest.mark.parametrize("fault", FAULTS)
    def test_import_and_train_refuse_same_faulty_weights(self, fault, directory, capsys):
        """Check that both use the same message, before any weights are read."""
        assert import_model([str(directory)]) == 0
        capsys.readouterr()
        words = FAULTS[fault](directory)
        told = self.error(import_model, [str(directory)])
        assert words in told
        assert told == self.error(read, directory, CASES["llama"])
        assert capsys.readouterr().out == ""

    def test_printed_command_is_safe_in_a_shell(self, tmp_path, capsys):
        directory = write(tmp_path / "a b;touch pwned,$(id)'\"", CASES["llama"], randomised(CASES["llama"]))
        assert import_model([str(directory)]) == 0
        program, *words = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
        assert program == "train"
        assert compose_one(words).model.weights == str(directory)

    def test_files_absent_from_index_are_ignored(self, directory):
        for name in ("adapter_model", "consolidated"):
            save_file({"model.norm.weight": torch.zeros(1)}, directory / f"{name}.safetensors")
        assert import_model([str(directory)]) == 0
        found = read(directory, CASES["llama"])
        assert found.head.norm.weight.equal(randomised(CASES["llama"]).head.norm.weight)

    def test_single_weight_file_with_index_is_accepted(self, tmp_path):
        out = write(tmp_path / "hf", CASES["llama"], randomised(CASES["llama"]))
        names = load_file(out / "model.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        (out / "model.safetensors.index.json").write_text(json.dumps(index))
        assert import_model([str(out)]) == 0

    def test_export_refuses_existing_directory(self, directory):
        before = {path.name: path.read_bytes() for path in directory.iterdir()}
        assert "exists" in self.error(write, directory, CASES["llama"], randomised(CASES["llama"]))
        assert before == {path.name: path.read_bytes() for path in directory.iterdir()}

    @pytest.mark.parametrize("fault", ["missing", "twice", "unknown", "shape"])
    def test_failed_export_leaves_no_files(self, fault, tmp_path):
        tree, plan = plan_decoder(CASES["llama"])
        arrays = [(name, torch.zeros(shape)) for name, shape in get_parameter_shapes(tree).items()]
        broken = {
            "missing": arrays[:-1],
            "twice": [*arrays, arrays[0]],
            "unknown": [*arrays, ("mystery", torch.zeros(1))],
            "shape": [(arrays[0][0], torch.zeros(2, 2)), *arrays[1:]],
        }[fault]
        with pytest.raises(ValueError, match=r"array"):
            export(tmp_path / "out", broken, plan=plan, shapes=get_parameter_shapes(tree), config={})
        assert list(tmp_path.iterdir()) == []


def test_run_survives_export_and_import(runs, capsys):
    """Train, export, load with transformers, import, and train on from the import."""
    runs.train("run.dir=first", "model.tied=true")
    out = runs.directory / "hf"
    assert export_run([str(runs.directory / "first"), str(out)]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert theirs.config.num_hidden_layers == 2
    assert import_model([str(out)]) == 0
    words = capsys.readouterr().out.replace("\\\n", " ").split()
    command = words[words.index("train") + 1 :]
    assert f"model.weights={out}" in command
    runs.train(*command, "run.dir=second", "run.steps=1", "optimizer.learning_rate=0", "schedule=constant")
    first, second = (
        export_run([str(runs.directory / name), str(runs.directory / f"{name}-out"), "--dtype", "bfloat16"])
        or load_file(runs.directory / f"{name}-out" / "model.safetensors")
        for name in ("first", "second")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    capsys.readouterr()
    shutil.rmtree(out)
    assert "model.weights" in runs.expect_refusal(*command, "run.dir=third")
    printed = runs.train("resume=second", "run.steps=2")  # weights are in the checkpoint of the run
    assert len(runs.read_records("second")) == 2, printed
    with pytest.raises(UserError, match="no checkpoint step-00000099"):
        export_run([str(runs.directory / "first"), str(out), "--checkpoint", "step-00000099"])
