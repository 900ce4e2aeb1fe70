"""`gangline sample`: text from the checkpoints of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from gangline.batch import Batch
from gangline.checkpoint import SaveRequest
from gangline.checkpoint.config import Off
from gangline.checkpoint.torch_dcp import DcpCheckpointer
from gangline.cli.main import main
from gangline.config import Run, default_run
from gangline.data.config import TextConfig
from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.model.config import Tiny
from gangline.model.init import initialise
from gangline.rundir import RunDirectory
from gangline.sample import generate, sample
from gangline.shard import Layout, Registry, Shard
from gangline.testing.inputs import whole_sequences

CONTEXT = 16
MOMENT = torch.full((9,), 7.25)


def make_run(path: Path, *steps: int, data: TextConfig | None = None, checkpoint=None, tied: bool = False) -> Run:
    """A run directory with a checkpoint at each of `steps`, whose weights are those of seed `step`."""
    run = default_run(
        model=Tiny(dim=32, layers=2, heads=2, kv_heads=1, hidden=64, tied=tied, init_std=0.5),
        checkpoint=checkpoint or "torch",
        data=data or "text",
        run={"dir": str(path)},
        batch={"sequence_length": CONTEXT},
    )
    directory = RunDirectory.create(run)
    kept = DcpCheckpointer(str(path))
    for step in steps:
        shards = [*drawn(run, step)[1], Shard("optimizer/m", (9,), torch.float32, (0,), MOMENT)]
        registry = Registry.of(Mesh.of({}), {shard.name: Layout(shard.global_shape) for shard in shards})
        kept.save(SaveRequest(step), shards, registry, {"step": step, "attempt": 1})
    directory.unlock()
    return run


def drawn(run: Run, seed: int):
    """(model, its weights as shards), drawn from the seed."""
    tree, plan = compose_model(run)
    model = materialise(construct(tree), plan)
    shards = [
        Shard(f"model/{name}", tuple(p.shape), p.dtype, (0,) * p.dim(), p.detach())
        for name, p in model.named_parameters()
    ]
    initialise(shards, plan, seed)
    return model, shards


# --- generate --------------------------------------------------------------------------------------------------------


def test_temperature_0_takes_the_likeliest_within_the_context(tmp_path):
    model, _ = drawn(make_run(tmp_path / "run"), seed=3)
    row = [1, 2, 3]
    with torch.no_grad():
        for _ in range(2 * CONTEXT):
            row.append(int(model.logits(whole_sequences(torch.tensor([row[-CONTEXT:]])))[0, -1].argmax()))
    assert generate(model, [1, 2, 3], 2 * CONTEXT, 0.0, 0, CONTEXT) == row[3:]
    assert generate(model, [1, 2, 3], 2 * CONTEXT, 0.9, 5, CONTEXT, top_k=1) == row[3:]


def test_a_seed_writes_the_same_again_and_another_something_else(tmp_path):
    model, _ = drawn(make_run(tmp_path / "run"), seed=3)
    model.train()
    texts = [generate(model, [65], 40, 1.0, seed, CONTEXT) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert model.training, "the model is left as it was"
    assert generate(model, [65], 0, 1.0, 0, CONTEXT) == []


class Fixed(torch.nn.Module):
    """Says the same about every next token."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.answer = torch.nn.Parameter(torch.tensor(logits))
        self.head = SimpleNamespace(logits=lambda hidden: hidden)

    def hidden(self, batch: Batch) -> torch.Tensor:
        return self.answer.expand(*batch.shape, -1)


def shares(logits: list[float], **how) -> list[float]:
    drawn = generate(Fixed(logits), [0], 4000, how.pop("temperature", 1.0), 0, 1, **how)
    return [drawn.count(token) / len(drawn) for token in range(len(logits))]


def test_tokens_are_drawn_as_often_as_the_model_says():
    logits = [0.0, 1.0, 2.0, -1.0]
    assert shares(logits) == pytest.approx(torch.tensor(logits).softmax(0).tolist(), abs=0.03)
    colder = (torch.tensor(logits) / 0.5).softmax(0).tolist()
    assert shares(logits, temperature=0.5) == pytest.approx(colder, abs=0.03)
    two = (torch.tensor([1.0, 2.0])).softmax(0).tolist()
    assert shares(logits, top_k=2) == pytest.approx([0, *two, 0], abs=0.03)
    assert shares(logits, top_k=99) == shares(logits)


# --- from a run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_newest_checkpoint_is_taken_or_the_one_asked_for(tmp_path, tied):
    run = make_run(tmp_path / "run", 5, 9, tied=tied)

    def expected(step: int) -> str:
        tokens = generate(drawn(run, step)[0], list(b"def "), 30, 0.8, 0, CONTEXT)
        return "def " + bytes(tokens).decode(errors="replace").replace("\0", "\n")

    assert sample(run.run.dir, "def ", 30) == expected(9)
    assert sample(run.run.dir, "def ", 30, checkpoint="step-00000005") == expected(5)
    assert expected(5) != expected(9)


def test_only_the_weights_are_read(tmp_path):
    run = make_run(tmp_path / "run", 1)
    before = sample(run.run.dir, "a", 10)
    path = tmp_path / "run/checkpoints/step-00000001/__0_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.index(MOMENT.numpy().tobytes())  # the optimizer's only array
    content[at] ^= 1
    path.write_bytes(content)
    assert sample(run.run.dir, "a", 10) == before


def test_a_run_that_was_moved_away_from_its_text_still_writes(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text " * 100)
    make_run(tmp_path / "run", 1, data=TextConfig(path=str(corpus)))
    (tmp_path / "run").rename(tmp_path / "moved")
    corpus.unlink()
    assert len(sample(tmp_path / "moved", "", 10)) >= 1


def words(path: Path, *known: str) -> TextConfig:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return TextConfig(tokenizer=str(path))


def test_what_is_missing_is_said(tmp_path):
    def told(*arguments, **more) -> str:
        with pytest.raises(UserError) as caught:
            sample(*arguments, **more)
        return str(caught.value)

    assert "there is no run directory" in told(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "half-written" in told(tmp_path / "empty")
    make_run(tmp_path / "new")
    assert "has no checkpoint to sample from" in told(tmp_path / "new")
    make_run(tmp_path / "off", checkpoint=Off())
    assert "checkpoint=off" in told(tmp_path / "off")
    make_run(tmp_path / "run", 1, 2)
    assert "It has step-00000001, step-00000002" in told(tmp_path / "run", checkpoint="step-00000003")
    assert "no checkpoint newest" in told(tmp_path / "run", checkpoint="newest")


def test_a_prompt_outside_the_vocabulary_is_refused(tmp_path, monkeypatch):
    make_run(tmp_path / "few", 1, data=words(tmp_path / "few.json", "yes", "no"))
    with pytest.raises(UserError, match="no tokens for 'maybe'"):
        sample(tmp_path / "few", "maybe")
    make_run(tmp_path / "many", 1, data=words(tmp_path / "many.json", *(f"w{n}" for n in range(300))))
    with pytest.raises(UserError, match="has token 299, and the model knows 256"):
        sample(tmp_path / "many", "w1 w299")
    monkeypatch.setattr(TextConfig, "codec", lambda self: SimpleNamespace(encode=lambda text: None))
    with pytest.raises(UserError, match="is not text"):
        sample(tmp_path / "few", "yes")


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_the_text(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1)
    arguments = ["sample", run.run.dir, "--prompt", "def ", "--tokens", "20", "--temperature", "0.5", "--seed", "3"]
    assert main([*arguments, "--top-k", "40", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == sample(run.run.dir, "def ", 20, temperature=0.5, seed=3, top_k=40) + "\n"


def test_the_command_refuses_with_code_2_and_no_traceback(tmp_path, capsys):
    assert main(["sample", str(tmp_path / "absent")]) == 2
    assert "there is no run directory" in capsys.readouterr().err
    for wrong in (["--tokens", "-1"], ["--temperature", "-0.5"], ["--top-k", "0"], ["--tokens", "many"]):
        with pytest.raises(SystemExit) as ended:
            main(["sample", str(tmp_path), *wrong])
        assert ended.value.code == 2
        assert wrong[0] in capsys.readouterr().err


def test_what_several_processes_trained_one_samples(runs):
    runs.train("parallel=ddp", "launch.processes=2", "run.dir=r")
    command = [sys.executable, "-m", "gangline.cli.main", "sample", "r", "--prompt", "the ", "--tokens", "20"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=runs.directory, capture_output=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"the ")
    assert len(done.stdout) > 10
