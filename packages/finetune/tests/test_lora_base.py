"""`lora.base`: quantized frozen weights, compared with runs whose weights were rounded beforehand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from small_models import SHORT, llama, logits, opened

from gangline.cli.main import main
from gangline.model.compose import compose_model
from gangline.model.tree import get_parameter_shapes
from gangline_basics.model.low_bit import Codes, decode, encode
from gangline_models.hugging_face.adapters import find_frozen_bits
from gangline_testkit import ModelEditSuite, RealRuns
from gangline_testkit.sessions import open_session

SETTINGS = (*SHORT, "run.steps=3", "lora=on", "lora.rank=4")
# Block sizes of the codes; w_down has 48 inputs. o_proj is not in the list: its heads have 8 features, and no block of
# 16 divides 8.
BLOCKS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 32) | {"down_proj": 16}


class TestEightBits(ModelEditSuite):
    choice = "lora=on"
    settings = ("lora.rank=3", "lora.base=8bit")
    model = ("model.dim=64", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=128")
    layouts = (1, 2)


class TestBf16(ModelEditSuite):
    choice = "lora=on"
    settings = ("lora.rank=3", "lora.base=bf16")
    layouts = (1, 2)


def test_codes_match_quantization_formula():
    torch.manual_seed(0)
    w = torch.randn(3, 32) * torch.tensor([[1.0], [1e-3], [100.0]])
    w[1, 16:] = 0
    codes, scales = encode(w, 16)
    for row in range(3):
        for block in range(2):
            values = w[row, 16 * block : 16 * block + 16].tolist()
            scale = max(map(abs, values)) / 127
            assert scales[row, block].item() == pytest.approx(scale, rel=1e-6)
            wanted = [round(value / scale) if scale else 0 for value in values]
            assert codes[row, 16 * block : 16 * block + 16].tolist() == wanted
    error = (decode(codes, scales) - w).abs().view(3, 2, 16)
    assert bool((error <= scales[..., None] * 0.5000001).all())
    with pytest.raises(ValueError, match="not finite"):
        encode(torch.full((1, 16), torch.inf), 16)


def test_quantized_matmul_matches_dequantized_and_saves_no_weights():
    torch.manual_seed(0)
    codes = Codes(*encode(torch.randn(24, 32), 16))
    x, b = torch.randn(2, 5, 32, requires_grad=True), torch.randn(24, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        y = torch.nn.functional.linear(x, codes, b)
    assert not kept
    y.backward(torch.ones_like(y))
    plain, bias = x.detach().clone().requires_grad_(), b.detach().clone().requires_grad_()
    wanted = torch.nn.functional.linear(plain, codes.dequantise(), bias)
    wanted.backward(torch.ones_like(wanted))
    assert torch.equal(y, wanted)
    torch.testing.assert_close(x.grad, plain.grad)
    torch.testing.assert_close(b.grad, bias.grad)
    torch.testing.assert_close(x.detach() @ codes.dequantise().t(), y.detach() - b.detach(), rtol=1e-4, atol=1e-4)


def rounded(base: Path, to: Path, kind: str) -> Path:
    """Write a copy of the base with rounded matrices, by the definition and not by the package's plan."""
    shutil.copytree(base, to)
    path = to / "model.safetensors"
    tensors = load_file(path)
    for name, w in tensors.items():
        short = name.split(".")[-2]
        if w.dim() < 2:
            continue
        if kind == "8bit" and short in BLOCKS:
            blocks = w.view(len(w), -1, BLOCKS[short])
            scales = blocks.abs().amax(-1, keepdim=True) / 127
            tensors[name] = ((blocks / scales).round() * scales).view_as(w)
        else:
            tensors[name] = w.bfloat16().float()
    save_file(tensors, path, {"format": "pt"})
    return to


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    with RealRuns(folder, SETTINGS) as found:
        found.base = llama(folder / "base")
        yield found


def test_bf16_base_file_is_not_reported_as_rounded(tmp_path):
    words = llama(tmp_path / "base")
    run = open_session(tmp_path / "run", *words, "lora=on", "lora.base=bf16").run
    tree, plan = compose_model(run)
    shapes = get_parameter_shapes(tree)
    assert find_frozen_bits(shapes, plan, str(tmp_path / "base")) == 16
    opened(tmp_path / "base").bfloat16().save_pretrained(tmp_path / "half")
    assert find_frozen_bits(shapes, plan, str(tmp_path / "half")) is None
    assert find_frozen_bits(shapes, plan, str(tmp_path / "gone")) == 16
    assert find_frozen_bits(shapes, plan, None) == 16


def gangline(*words: object) -> None:
    assert main(list(map(str, words))) == 0


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_low_precision_base_matches_rounded_base(runs, kind, capfd):
    here = runs.directory
    rounded(here / "base", here / f"rounded-{kind}", kind)
    other = [word.replace(str(here / "base"), str(here / f"rounded-{kind}")) for word in runs.base]
    runs.train(f"run.dir={kind}", *runs.base, f"lora.base={kind}")
    runs.train(f"run.dir=full-{kind}", *other)
    for ours, theirs in zip(runs.read_records(kind), runs.read_records(f"full-{kind}"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    for run in (kind, f"full-{kind}"):
        gangline("export", here / run, here / f"{run}-merged", "--merge")
        capfd.readouterr()
        gangline("export", here / run, here / f"{run}-adapter", "--adapter-only", "lora")
        bits = {"bf16": 16, "8bit": 8}.get(run)
        told = f"trained on the weights of {here / 'base'} rounded to {bits} bits" if bits else ""
        said = capfd.readouterr().err
        assert (told in said and "--merge instead of --adapter-only" in said) if told else "rounded" not in said, said
    ours, theirs = (logits(opened(here / f"{run}-merged")) for run in (kind, f"full-{kind}"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, logits(opened(here / "base")), atol=1e-2)
    beside = PeftModel.from_pretrained(opened(here / f"rounded-{kind}"), here / f"{kind}-adapter")
    torch.testing.assert_close(logits(beside), ours, rtol=1e-4, atol=1e-4)
    runs.train(f"resume={kind}", "run.steps=4")
    runs.train(f"resume=full-{kind}", "run.steps=4")
    ours, theirs = (runs.read_records(run)[-1]["loss"] for run in (kind, f"full-{kind}"))
    assert ours == pytest.approx(theirs, rel=1e-5)
    gangline("sample", here / kind, "--tokens", "4", "--prompt", "a")


def test_weight_bytes_match_closed_form(tmp_path):
    """Compare the bytes of weights in a process with a count by hand and with `explain`."""
    dim, hidden, vocabulary, layers = 64, 128, 256, 2
    words = (
        f"model.dim={dim}",
        f"model.ffn_dim={hidden}",
        f"model.layers={layers}",
        "model.heads=2",
        "model.kv_heads=2",
    )
    words += (f"model.vocab_size={vocabulary}", "model.tied=false", "precision=bf16", "lora=on", "lora.rank=2")
    linears = layers * (4 * dim * dim + 3 * dim * hidden)
    scales = layers * (3 * dim * dim // 64 + dim * dim // 32 + 3 * dim * hidden // 64)  # wo: heads of 32 features
    norms, adapters = (2 * layers + 1) * dim, layers * 2 * (4 * 2 * dim + 3 * (dim + hidden))
    wanted = {
        "full": 6 * (linears + 2 * vocabulary * dim),
        "bf16": 2 * (linears + 2 * vocabulary * dim),
        "8bit": linears + 4 * scales + 2 * 2 * vocabulary * dim,
    }
    for base, matrices in wanted.items():
        made = open_session(tmp_path / base, *words, f"lora.base={base}")
        storage = made.runtime.storage
        tensors = {x.data_ptr(): x.nbytes for x in (*storage.masters.values(), *storage.used.values())}
        assert sum(tensors.values()) == matrices + 6 * (norms + adapters), base
        explained = made.run.parallel.explain(made.run, made.mesh)
        told = explained.ranks[0].bytes
        assert told["weights"] + told["master weights"] == sum(tensors.values()), base


def test_unsupported_lora_base_combinations_are_refused(runs):
    for words, told in (
        (("lora.base=bf16", "precision=fp16"), "lora.base=bf16 is not supported with matmuls in float16"),
        (("lora.base=8bit", "precision=fp16"), "lora.base=8bit is not supported with matmuls in float16"),
        (("lora.base=8bit", "run.compile=true"), "lora.base=8bit is not supported with run.compile=true"),
    ):
        assert told in runs.expect_refusal("run.dir=no", *runs.base, *words)


def test_dora_uses_norms_of_quantized_weights(runs):
    """Check that an adapter exported from a quantized base gives the same merged weights when a run starts from it."""
    here = runs.directory
    words = ("lora.dora=true", "lora.base=8bit", *runs.base)
    runs.train("run.dir=dora", *words)
    gangline("export", here / "dora", here / "dora-adapter", "--adapter-only", "lora")
    gangline("export", here / "dora", here / "dora-merged", "--merge")
    runs.train("run.dir=on", *words, "lora.adapter=dora-adapter", "optimizer.learning_rate=0", "run.steps=1")
    gangline("export", here / "on", here / "on-merged", "--merge")
    ours, theirs = (logits(opened(here / name)) for name in ("on-merged", "dora-merged"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_weights_that_are_not_finite_are_refused(runs):
    path = runs.directory / "spoilt" / "model.safetensors"
    shutil.copytree(runs.directory / "base", path.parent)
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    words = [word.replace(str(runs.directory / "base"), str(path.parent)) for word in runs.base]
    said = runs.expect_refusal("run.dir=no", *words, "lora.base=8bit")
    assert "blocks.1.feed_forward.w_up.weight cannot be stored in 8 bits: a weight is not finite" in said, said
