"""`data=chat`, preferences and `lora=on` across packages: the curve of one process on every axis, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline_testkit import RealRuns

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
STEPS = 3
SETTINGS = (
    "recipe=quick",
    "precision=fp64",
    "batch.global_size=8",
    "batch.sequence_length=96",
    "model.layers=4",
    f"run.steps={STEPS}",
    "run.sample=0",
    f"validate.every={STEPS}",
    "validate.samples=4",
    "data.validation_fraction=0.2",
    "track=[jsonl]",
    "track.jsonl.figure=false",
    "lora=on",
    "schedule=constant",
    "optimizer.learning_rate=0.01",
)
LAYOUTS = {
    "tp": ("parallel=tp", "launch.processes=2"),
    "cp and pp": ("parallel=3d", "parallel.cp=2", "parallel.pp=2", "launch.processes=4"),
    "zero 3": ("parallel=fsdp", "launch.processes=2"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("finetune")
    tokenizer(folder)
    with RealRuns(folder, SETTINGS) as found:
        found.settings = (*SETTINGS, "data.tokenizer=tokenizer.json")
        yield found


def tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE})
    )
    pairs = [{"prompt": f"{n}?", "chosen": f"It is {n + 1}.", "rejected": "No idea!"} for n in range(40)]
    chats = [
        {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["chosen"]}]}
        for p in pairs
    ]
    for name, rows in (("pairs", pairs), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


KINDS = {
    "chat": ("data=chat", "data.path=chats.jsonl"),
    "chat with experts": (
        "data=chat",
        "data.path=chats.jsonl",
        "moe=on",
        "moe/router=softmax",
        "moe.router.z_loss=0.1",
        "moe.router.seq_aux_loss=0.1",
    ),
    "preferences": ("data=preferences", "data.path=pairs.jsonl", "dpo=on"),
}


def trained(runs, name: str, *words: str) -> list[dict]:
    """Train a run unless it exists; return its first `STEPS` records, because another test may have resumed it."""
    place = name.replace(" ", "-")
    if not (runs.directory / place).exists():
        runs.train(f"run.dir={place}", *words)
    return runs.read_records(place)[:STEPS]


def nights(cases: dict[str, tuple[str, ...]], days: set[tuple[str, str]]) -> list:
    """Return every pair of a case and one of its layouts; pairs outside of `days` are marked as nightly."""
    pairs = [(case, layout) for case, layouts in cases.items() for layout in layouts]
    return [pytest.param(*pair, marks=() if pair in days else pytest.mark.nightly) for pair in pairs]


# By default, each kind of chat runs on one layout, and preference pairs run on all.
DAYS = {("chat", "tp"), ("chat with experts", "cp and pp"), *(("preferences", layout) for layout in LAYOUTS)}


@pytest.mark.parametrize(("kind", "layout"), nights(dict.fromkeys(KINDS, tuple(LAYOUTS)), DAYS))
def test_fine_tuning_matches_one_process_on_every_axis(runs, kind, layout):
    wanted = trained(runs, kind, *KINDS[kind])
    assert wanted[0]["loss"] > wanted[-1]["loss"], "training changed nothing"
    for ours, theirs in zip(trained(runs, f"{kind} {layout}", *KINDS[kind], *LAYOUTS[layout]), wanted, strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            if theirs[key] is not None:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-10), key
        assert ours["tokens"] == theirs["tokens"]
        if kind == "preferences":
            assert ours["metrics"]["dpo_pairs"] == theirs["metrics"]["dpo_pairs"] == 8


def test_router_loss_with_preference_loss_is_refused(runs):
    """Check each router loss. Only one target of a pair counts, so the other tokens would have no weight."""
    router = ("moe=on", "moe/router=softmax")
    for what in ("z_loss", "seq_aux_loss", "global_aux_loss"):
        said = runs.expect_refusal("run.dir=no", *KINDS["preferences"], *router, f"moe.router.{what}=0.01")
        assert "dpo=on does not support the loss that blocks.0.feed_forward.router adds" in said, said
    runs.train("run.dir=experts", *KINDS["preferences"], "moe=on", "moe.router.seq_aux_loss=0", "run.steps=1")


WIDE = ("model.dim=64", "model.heads=2", "model.kv_heads=2", "model.ffn_dim=128")
KEPT = {
    "8bit": (*WIDE, "lora.base=8bit"),
    "8bit with experts": (*WIDE, "lora.base=8bit", "moe=on", "moe.router.seq_aux_loss=0"),
    "bf16": ("lora.base=bf16",),
}
CUT = LAYOUTS | {
    "tp and zero 1": ("parallel=3d", "parallel.tp=2", "parallel.dp_shard=2", "launch.processes=4"),
    "zero 3 and ep": ("parallel=fsdp", "moe.ep=2", "launch.processes=2"),
}
DENSE = tuple(name for name in CUT if "ep" not in name)
# By default, 8-bit codes run on layouts that gather weights or shard them by tp; bfloat16 runs where both happen.
ROUNDED = {
    ("8bit", "zero 3"),
    ("8bit", "tp and zero 1"),
    ("bf16", "tp and zero 1"),
    ("8bit with experts", "zero 3 and ep"),
}


@pytest.mark.parametrize(
    ("kind", "layout"), nights({"8bit": DENSE, "bf16": DENSE, "8bit with experts": ("zero 3 and ep",)}, ROUNDED)
)
def test_quantized_base_matches_one_process_on_every_axis(runs, kind, layout):
    """Check that weights are rounded before they are sharded, so that all layouts multiply with the same values."""
    words, place = (*KINDS["chat"], *KEPT[kind]), f"{kind} {layout}"
    wanted = trained(runs, kind, *words)
    for ours, theirs in zip(trained(runs, place, *words, *CUT[layout]), wanted, strict=True):
        for key in ("loss", "grad_norm", "validation_loss"):
            if theirs[key] is not None:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-10), key


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("8bit", "zero 3"),
        pytest.param("bf16", "tp and zero 1", marks=pytest.mark.nightly),
        pytest.param("8bit with experts", "zero 3 and ep", marks=pytest.mark.nightly),
    ],
)
def test_resumed_quantized_run_matches_uninterrupted_run(runs, kind, layout):
    """Resume a sharded run and a run on one process, each from its own checkpoint."""
    words, (whole, place) = (
        (*KINDS["chat"], *KEPT[kind]),
        (kind.replace(" ", "-"), f"{kind} {layout}".replace(" ", "-")),
    )
    trained(runs, whole, *words)
    trained(runs, place, *words, *CUT[layout])
    for one in (whole, place):
        runs.train(f"resume={one}", f"run.steps={STEPS + 1}")
    assert runs.read_records(place)[-1]["loss"] == pytest.approx(runs.read_records(whole)[-1]["loss"], rel=1e-10)


def test_adapter_checkpoints_move_between_layouts(runs):
    """Resume adapters on layouts other than the one that saved them; each rank initializes its base weights again."""
    words = (
        *KINDS["chat"],
        *KEPT["8bit"],
        "checkpoint=zarr",
        "checkpoint.every=2",
        "run.steps=4",
        "validate.every=null",
    )
    runs.train("run.dir=all", *words)
    runs.train(
        "run.dir=alone", *words, "checkpoint.save_frozen=false", "parallel=fsdp", "launch.processes=2", "run.steps=2"
    )
    runs.train("resume=alone", "run.steps=3", "parallel=3d", "parallel.tp=2", "parallel.pp=2", "launch.processes=4")
    runs.train("resume=alone", "run.steps=4", "parallel=single", "launch.processes=1")
    losses = [[record["loss"] for record in runs.read_records(name)] for name in ("all", "alone")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
    sizes = [
        sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        for place in (runs.directory / name / "checkpoints" / "step-00000004" for name in ("all", "alone"))
    ]
    assert sizes[1] < sizes[0]
    import torch
    from safetensors.torch import load_file

    from gangline.cli.main import main
    from gangline_basics.sampling.sampler import sample

    here = runs.directory
    for name in ("all", "alone"):
        assert main(["ckpt", "export", str(here / name), str(here / f"{name}-out"), "--merge"]) == 0
    ours, theirs = (load_file(here / f"{name}-out" / "model.safetensors") for name in ("alone", "all"))
    assert ours.keys() == theirs.keys()
    for tensor in theirs:
        torch.testing.assert_close(ours[tensor], theirs[tensor], rtol=1e-6, atol=1e-7)
    adapters = []
    for verb in (["export"], ["ckpt", "export"]):
        out = here / f"{verb[0]}-adapter"
        assert main([*verb, str(here / "alone"), str(out), "--adapter-only", "lora"]) == 0
        adapters.append(load_file(out / "adapter_model.safetensors"))
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    one, other = (sample(here / name, "3?", 6, temperature=0.0) for name in ("all", "alone"))
    assert one == other
    for name in ("all", "alone"):
        assert (
            main(
                [
                    "ckpt",
                    "average",
                    str(here / name),
                    "step-00000004",
                    "step-00000004",
                    "-o",
                    str(here / f"{name}-mean"),
                ]
            )
            == 0
        )
        runs.train(f"from={name}", f"run.dir={name}-mean", "run.steps=1")
    assert runs.read_records("alone-mean")[0]["loss"] == pytest.approx(
        runs.read_records("all-mean")[0]["loss"], rel=1e-10
    )


def test_tp_shard_inside_quantization_block_is_refused(runs):
    said = runs.expect_refusal("run.dir=no", *KINDS["chat"], "lora.base=8bit", "parallel=tp", "launch.processes=2")
    assert "does not divide" in said, said
    assert "scales" in said, said
    assert "8-bit weights (8bit)" in said, said
    assert "lora.base=bf16" in said, said


def test_expert_load_excludes_padding(runs):
    """Compare losses and expert loads for rows of two lengths, on one process and on several."""
    router = ("moe=on", "moe/router=sigmoid", "moe.router.bias_rate=0.1", "moe.router.seq_aux_loss=0")
    asked = (*KINDS["preferences"], *router, "validate.every=null")
    lengths = {"row": (), "long-row": ("batch.sequence_length=160",), "row-in-parts": LAYOUTS["cp and pp"]}
    for name, words in lengths.items():
        runs.train(f"run.dir={name}", *asked, *words)
    wanted = runs.read_records("row")
    loads = [key for key in wanted[0]["metrics"] if key.endswith("/load")]
    assert len(loads) == 4
    for name in lengths:
        for ours, theirs in zip(runs.read_records(name), wanted, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10), name
            for key in loads:
                assert ours["metrics"][key] == theirs["metrics"][key], (name, key)


@pytest.mark.nightly
def test_import_fine_tune_export_matches_transformers(tmp_path):
    """Import a model, fine-tune adapters on eight processes, export it, and compare tokens with `gangline sample`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from gangline.cli.main import main
    from gangline_basics.sampling.sampler import sample
    from gangline_models.hugging_face.commands import list_overrides

    base = tmp_path / "base"
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, initializer_range=0.3)).save_pretrained(base)
    tokenizer(base)
    more = ("batch.global_size=8", "batch.sequence_length=64", "run.steps=3", "precision=fp32", "run.sample=0")
    with RealRuns(tmp_path, more) as runs:
        runs.settings = (*more, *list_overrides(base))
        learn = ("lora=on", "data=chat", f"data.path={base}/chats.jsonl", "optimizer.learning_rate=0.02")
        runs.train("run.dir=run", *learn, "parallel=3d", "launch.processes=8", "track=[console]")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merge"]) == 0
    model, codec = (cls.from_pretrained(tmp_path / "out") for cls in (AutoModelForCausalLM, AutoTokenizer))
    prompt = codec.apply_chat_template([{"role": "user", "content": "3?"}], tokenize=False, add_generation_prompt=True)
    row = codec(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        for _ in range(16):
            row = torch.cat((row, model(row).logits[:, -1:].argmax(-1)), 1)
    assert sample(tmp_path / "run", prompt, 16, temperature=0.0) == codec.decode(row[0])
