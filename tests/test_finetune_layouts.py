"""Chats and preferences across packages: the curve of a run is that of one process on every axis, in float64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline.testing import RealRuns

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
SETTINGS = (
    "recipe=quick",
    "precision=fp64",
    "batch.global_size=8",
    "batch.sequence_length=96",
    "model.layers=4",
    "run.steps=3",
    "run.sample=0",
    "validate.every=3",
    "validate.samples=4",
    "data.validation_fraction=0.2",
    "track=[jsonl]",
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
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    pairs = [{"prompt": f"{n}?", "chosen": f"It is {n + 1}.", "rejected": "No idea!"} for n in range(40)]
    chats = [
        {"messages": [{"role": "user", "content": p["prompt"]}, {"role": "assistant", "content": p["chosen"]}]}
        for p in pairs
    ]
    for name, rows in (("pairs", pairs), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


KINDS = {
    "chat": ("data=chat", "data.path=chats.jsonl"),
    "preferences": ("data=preferences", "data.path=pairs.jsonl", "dpo=on"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_axis_learns_what_one_process_does(runs, kind):
    runs.train(f"run.dir={kind}", *KINDS[kind])
    wanted = runs.records(kind)
    assert wanted[0]["loss"] > wanted[-1]["loss"], "nothing was learnt"
    for name, layout in LAYOUTS.items():
        place = f"{kind} {name}".replace(" ", "-")
        runs.train(f"run.dir={place}", *KINDS[kind], *layout)
        for ours, theirs in zip(runs.records(place), wanted, strict=True):
            for key in ("loss", "grad_norm", "validation_loss"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-10), (name, key)
            assert ours["tokens"] == theirs["tokens"]
            if kind == "preferences":
                assert ours["metrics"]["dpo_pairs"] == theirs["metrics"]["dpo_pairs"] == 8
