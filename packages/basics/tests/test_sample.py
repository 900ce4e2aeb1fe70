"""`gangline sample`: checkpoint choice, prompts, chats, stop strings, random draws, invalid arguments."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from gangline.batch import Batch
from gangline.checkpoint.base import SaveRequest
from gangline.cli.main import main
from gangline.config import Run
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.model.init import initialise
from gangline.run.directory import RunDirectory
from gangline.runtime import Sampling, Written
from gangline.shard import Layout, Registry, Shard
from gangline_basics.checkpoint.config import Off
from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer
from gangline_basics.data.config import TextConfig
from gangline_basics.model.config import Tiny
from gangline_basics.sampling.prompts import read_prompts
from gangline_basics.sampling.sampler import Sampler, generate, sample
from gangline_basics.sampling.text import build_codec, cut_at_stop, encode, find_ends
from gangline_testkit import warm
from gangline_testkit.inputs import make_full_batch

CONTEXT = 16
MOMENT = torch.full((9,), 7.25)


def make_run(path: Path, *steps: int, data: TextConfig | None = None, checkpoint=None, tied: bool = False) -> Run:
    """Create a run directory with a checkpoint at each of `steps`; the seed of the weights is the step."""
    run = build_default_run(
        model=Tiny(dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=64, tied=tied, init_std=0.5),
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
    """Return (model, weights of the model as shards), initialized from the seed."""
    tree, plan = compose_model(run)
    model = materialise(construct(tree), plan)
    shards = [
        Shard(f"model/{name}", tuple(p.shape), p.dtype, (0,) * p.dim(), p.detach())
        for name, p in model.named_parameters()
    ]
    initialise(shards, plan, seed)
    return model, shards


# --- generate --------------------------------------------------------------------------------------------------------


def written(model, start: list[int], tokens: int, seed: int = 0, cached: bool = True, **how) -> list[int]:
    return generate(model, [start], Sampling(tokens=tokens, seed=seed, **how), cached=cached)[0].tokens


def test_temperature_0_takes_most_likely_token(tmp_path):
    model, _ = drawn(make_run(tmp_path / "run"), seed=3)
    row = [1, 2, 3]
    with torch.no_grad():
        for _ in range(CONTEXT):
            row.append(int(model.compute_logits(make_full_batch(torch.tensor([row])))[0, -1].argmax()))
    assert written(model, [1, 2, 3], CONTEXT) == row[3:]
    assert written(model, [1, 2, 3], CONTEXT, cached=False) == row[3:]
    assert written(model, [1, 2, 3], CONTEXT, 5, temperature=0.9, top_k=1) == row[3:]
    assert written(model, [1, 2, 3], CONTEXT, 5, temperature=0.9, top_p=1e-9) == row[3:]


def test_same_seed_gives_same_text(tmp_path):
    model, _ = drawn(make_run(tmp_path / "run"), seed=3)
    model.train()
    texts = [written(model, [65], 40, seed, temperature=1.0) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert model.training, "the model is left as it was"
    assert written(model, [65], 0) == []


def test_end_token_stops_only_one_sequence_of_batch(tmp_path):
    model, _ = drawn(make_run(tmp_path / "run"), seed=3)
    prompts = [[65], [9, 8, 7], [1, 2]]
    long = generate(model, prompts, Sampling(tokens=30), cached=True)
    assert [one.why for one in long] == ["length"] * 3
    end = long[1].tokens[4]
    for cached in (True, False):
        short = generate(model, prompts, Sampling(tokens=30, ends=frozenset({end})), cached=cached)
        assert short[1] == Written(long[1].tokens[: long[1].tokens.index(end)], "end")
        for before, after in zip(long, short, strict=True):
            assert before.tokens[: len(after.tokens)] == after.tokens
            assert len(after.tokens) == 30 or before.tokens[len(after.tokens)] == end


def test_invalid_sampling_settings_are_refused():
    for wrong in ({"tokens": -1}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**{"tokens": 3, **wrong})
    with pytest.raises(UserError, match="contain NaN"):
        generate(Fixed([0.0, float("nan")]), [[0]], Sampling(tokens=1))


class Fixed(torch.nn.Module):
    """Model that returns the same logits for every next token."""

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.answer = torch.nn.Parameter(torch.tensor(logits))
        self.head = SimpleNamespace(compute_logits=lambda hidden: hidden)

    def hidden(self, batch: Batch) -> torch.Tensor:
        return self.answer.expand(*batch.shape, -1)


def shares(logits: list[float], **how) -> list[float]:
    """Return the share of each token among 4,000 sampled tokens."""
    sampling = Sampling(tokens=20, **{"temperature": 1.0, **how})
    drawn = [token for text in generate(Fixed(logits), [[0]] * 200, sampling, cached=False) for token in text.tokens]
    return [drawn.count(token) / len(drawn) for token in range(len(logits))]


def test_token_frequencies_match_model_probabilities():
    logits = [0.0, 1.0, 2.0, -1.0]
    plain = shares(logits)
    assert plain == pytest.approx(torch.tensor(logits).softmax(0).tolist(), abs=0.03)
    colder = (torch.tensor(logits) / 0.5).softmax(0).tolist()
    assert shares(logits, temperature=0.5) == pytest.approx(colder, abs=0.03)
    two = (torch.tensor([1.0, 2.0])).softmax(0).tolist()
    assert shares(logits, top_k=2) == pytest.approx([0, *two, 0], abs=0.03)
    assert shares(logits, top_k=99) == plain == shares(logits, top_p=1.0)
    # Probabilities are 0.64, 0.24, 0.09, 0.03: a total of 0.7 takes the first two tokens.
    assert shares(logits, top_p=0.7) == pytest.approx([0, *two, 0], abs=0.03)


# --- checkpoints and prompts of a run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_newest_or_requested_checkpoint_is_loaded(tmp_path, tied):
    run = make_run(tmp_path / "run", 5, 9, tied=tied)

    def expected(step: int) -> str:
        tokens = written(drawn(run, step)[0], list(b"def "), 10, temperature=0.8, ends=frozenset({0}))
        return "def " + bytes(tokens).decode(errors="replace").replace("\0", "\n")

    assert sample(run.job.dir, "def ", 10) == expected(9)
    assert sample(run.job.dir, "def ", 10, checkpoint="step-00000005") == expected(5)
    assert expected(5) != expected(9)


def test_sampling_reads_only_model_weights(tmp_path):
    run = make_run(tmp_path / "run", 1)
    before = sample(run.job.dir, "a", 10)
    path = tmp_path / "run/checkpoints/step-00000001/__0_0.distcp"
    content = bytearray(path.read_bytes())
    at = content.index(MOMENT.numpy().tobytes())  # the only array of the optimizer
    content[at] ^= 1
    path.write_bytes(content)
    assert sample(run.job.dir, "a", 10) == before


def test_moved_run_without_corpus_still_samples(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some text " * 100)
    make_run(tmp_path / "run", 1, data=TextConfig(path=str(corpus)))
    (tmp_path / "run").rename(tmp_path / "moved")
    corpus.unlink()
    assert len(sample(tmp_path / "moved", "", 10)) >= 1


def words(path: Path, *known: str, bos: bool = False) -> TextConfig:
    """Write a word-level tokenizer. bos: the tokenizer adds the first word before, the second after a text."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        around = [(known[0], 0), (known[1], 1)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{known[0]} $A {known[1]}", special_tokens=around
        )
    tokenizer.save(str(path))
    return TextConfig(tokenizer=str(path))


@pytest.mark.parametrize(
    ("prompt", "bos", "tokens"),
    [("a b", True, [0, 2, 3]), ("bos a", True, [0, 2]), ("a b", False, [2, 3]), ([3], True, [3])],
)
def test_prompt_begins_with_the_bos_of_the_tokenizer(tmp_path, prompt, bos, tokens):
    run = make_run(tmp_path / "run", data=words(tmp_path / "words.json", "bos", "eos", "a", "b", bos=True))
    assert encode(build_codec(run), prompt, run, bos) == tokens


def test_empty_prompt_becomes_bos_or_newline(tmp_path):
    run = make_run(tmp_path / "bos", data=words(tmp_path / "words.json", "bos", "eos", bos=True))
    assert encode(build_codec(run), "", run)[0] == 0
    run = make_run(tmp_path / "bytes")
    assert encode(build_codec(run), "", run) == [ord("\n")]


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": {"eos_token_id": 2}}, {2}),
        ({"config.json": {"eos_token_id": [2, 5]}}, {2, 5}),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {}}, set()),
    ],
)
def test_end_tokens_come_from_weights_directory(tmp_path, files, ends):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    run = make_run(tmp_path / "run", data=words(tmp_path / "words.json", "a", "b"))
    assert find_ends(replace(run, model=replace(run.model, weights=str(tmp_path))), build_codec(run)) == ends


def test_missing_run_or_checkpoint_is_reported(tmp_path):
    def told(*arguments, **more) -> str:
        with pytest.raises(UserError) as caught:
            sample(*arguments, **more)
        return str(caught.value)

    assert "there is no run directory" in told(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "config.yaml is missing" in told(tmp_path / "empty")
    make_run(tmp_path / "new")
    assert "has no checkpoint to sample from" in told(tmp_path / "new")
    make_run(tmp_path / "off", checkpoint=Off())
    assert "checkpoint=off" in told(tmp_path / "off")
    make_run(tmp_path / "run", 1, 2)
    assert "Existing checkpoints: step-00000001, step-00000002" in told(tmp_path / "run", checkpoint="step-00000003")
    assert "checkpoint newest does not exist" in told(tmp_path / "run", checkpoint="newest")


def test_a_prompt_outside_the_vocabulary_is_refused(tmp_path, monkeypatch):
    make_run(tmp_path / "few", 1, data=words(tmp_path / "few.json", "yes", "no"))
    with pytest.raises(UserError, match="cannot encode 'maybe'"):
        sample(tmp_path / "few", "maybe")
    make_run(tmp_path / "many", 1, data=words(tmp_path / "many.json", *(f"w{n}" for n in range(300))))
    with pytest.raises(UserError, match="has token 299, but the vocabulary of the model has 256 tokens"):
        sample(tmp_path / "many", "w1 w299")
    for beyond in (-1, 256):
        with pytest.raises(UserError, match=f"has token {beyond}, but the vocabulary of the model has 256 tokens"):
            Sampler(tmp_path / "many").write([[1, beyond]], 3)
    monkeypatch.setattr(TextConfig, "build_codec", lambda self, run: SimpleNamespace(encode=lambda text: None))
    with pytest.raises(UserError, match="is not text"):
        sample(tmp_path / "few", "yes")


# --- command line -----------------------------------------------------------------------------------------------------


def test_sample_command_prints_generated_text(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1)
    arguments = ["sample", run.job.dir, "--prompt", "def ", "--tokens", "10", "--temperature", "0.5", "--seed", "3"]
    assert main([*arguments, "--top-k", "40", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == sample(run.job.dir, "def ", 10, temperature=0.5, seed=3, top_k=40) + "\n"


def test_command_completes_several_prompts_as_json(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1)
    file = tmp_path / "prompts.jsonl"
    file.write_text('"class A"\n\n{"prompt": "x"}\n')
    words = ["sample", run.job.dir, "--prompt", "def ", "--prompts", str(file), "--tokens", "8", "--device", "cpu"]
    assert main([*words, "--top-p", "0.9", "--json"]) == 0
    texts = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [text["prompt"] for text in texts] == ["def ", "class A", "x"]
    told = Sampler(run.job.dir).write(["def ", "class A", "x"], 8, top_p=0.9)
    assert [(text["text"], text["tokens"], text["why"]) for text in texts] == [(t.text, t.tokens, t.why) for t in told]
    assert main(words) == 0
    assert capsys.readouterr().out.count("---\n") == 2


def test_generated_text_ends_before_stop_string(tmp_path):
    sampler = Sampler(make_run(tmp_path / "run", 1).job.dir)
    (whole,) = sampler.write(["ab"], 12, temperature=0)
    stop = whole.text[5:7]
    (cut,) = sampler.write(["ab"], 12, temperature=0, stop=["never there", stop])
    assert cut.why == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert whole.tokens[: len(cut.tokens)] == cut.tokens


def test_stop_strings_may_contain_special_tokens(tmp_path):
    made = Tokenizer(models.WordLevel({word: id for id, word in enumerate("abcdefgh")}, unk_token="a"))
    made.add_special_tokens(["<x>"])
    made.save(str(tmp_path / "tokenizer.json"))
    sampler = Sampler(
        make_run(tmp_path / "run", 1, data=TextConfig(tokenizer=str(tmp_path / "tokenizer.json"))).job.dir
    )
    assert sampler.codec.decode([0, 8]) == "a"
    assert sampler.codec.decode_special([0, 8, 1]) == "a <x> b"
    assert cut_at_stop(sampler.codec, [0, 1, 8, 2], ["<x>", "c"]) == ([0, 1], " ")
    assert cut_at_stop(sampler.codec, [0, 1, 8, 2], ["x> c"]) == ([0, 1], " <")
    with torch.no_grad():
        for weight in sampler.model.state_dict().values():
            weight.zero_()
    sampler.model.head = AlwaysThis(8)
    (text,) = sampler.write(["a"], 4, temperature=0, stop=["<x>"])
    assert (text.tokens, text.why, text.text.strip()) == ([8], "stop", "")
    (rows,) = sampler.write([[0, 8]], 1, temperature=0)
    assert rows.prompt == "a <x>"


class AlwaysThis(torch.nn.Module):
    """Head that always predicts one token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self.token = token

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(*hidden.shape[:-1], 300)
        found[..., self.token] = 1
        return found


def test_generation_beyond_context_length_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1)
    assert main(["sample", run.job.dir, "--prompt", "abcdef", "--tokens", str(CONTEXT - 5)]) == 2
    assert f"Generate at most {CONTEXT - 6} tokens" in capsys.readouterr().err
    assert main(["sample", run.job.dir, "--prompt", "a" * CONTEXT]) == 2
    assert "Use a shorter prompt" in capsys.readouterr().err
    (text,) = Sampler(run.job.dir).write(["abcdef"])
    assert len(text.tokens) <= CONTEXT - 6


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}bot :{% endif %}"
)


def test_chats_use_template_and_its_end_token(tmp_path, capsys):
    known = ["user", "bot", ":", "hello", "stop", "there"]
    data = words(tmp_path / "tokenizer.json", *known)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "stop"}))
    run = make_run(tmp_path / "run", 1, data=data)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "there"}]}) + "\n")
    command = ["sample", run.job.dir, "--prompt", "hello", "--prompts", str(file), "--tokens", "3", "--json"]
    assert main([*command, "--chat"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [text["prompt"] for text in found] == ["user : hello bot :", "user : there bot :"]
    assert Sampler(run.job.dir).ends == frozenset({known.index("stop")})
    assert main(command) == 2
    assert "--chat" in capsys.readouterr().err
    (tmp_path / "tokenizer_config.json").unlink()
    assert main([*command, "--chat"]) == 2
    assert "a chat template is missing for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("absent.txt", None, "cannot be read"),
        ("empty.txt", "\n\n", "contains no prompts"),
        ("broken.jsonl", '"a"\n{"prompt"', ":2 is not JSON"),
        ("number.jsonl", "3\n", ":1 is not a prompt"),
        ("silent.jsonl", '{"messages": [{"content": "a"}]}\n', "without a role"),
    ],
)
def test_invalid_prompts_file_is_refused(tmp_path, name, content, what):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=what):
        read_prompts(tmp_path / name)


def test_prompts_are_split_at_line_feeds_only(tmp_path):
    """Check other separators of `str.splitlines`, which may occur in texts, and unescaped in JSON."""
    said = "a\u2028b\u0085c\x0cd"
    (tmp_path / "said.txt").write_bytes(f"{said}\r\ntwo\n".encode())
    assert read_prompts(tmp_path / "said.txt") == [said, "two"]
    said = said.replace("\x0c", "")
    (tmp_path / "said.jsonl").write_bytes(json.dumps({"prompt": said}, ensure_ascii=False).encode())
    assert read_prompts(tmp_path / "said.jsonl") == [said]


def test_invalid_command_exits_with_code_2(tmp_path, capsys):
    assert main(["sample", str(tmp_path / "absent")]) == 2
    assert "there is no run directory" in capsys.readouterr().err
    for wrong in (
        ["--tokens", "-1"],
        ["--top-p", "0"],
        ["--temperature", "-0.5"],
        ["--top-k", "0"],
        ["--tokens", "many"],
        ["--stop", ""],
    ):
        with pytest.raises(SystemExit) as ended:
            main(["sample", str(tmp_path), *wrong])
        assert ended.value.code == 2
        assert wrong[0] in capsys.readouterr().err


def test_damaged_checkpoint_is_reported_without_traceback(tmp_path, capsys):
    run = make_run(tmp_path / "run", 1, 2)
    for file in (tmp_path / "run" / "checkpoints" / "step-00000002").rglob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    words = ["--tokens", "2", "--device", "cpu"]
    assert main(["sample", run.job.dir, *words]) == 2
    told = capsys.readouterr().err
    assert "is damaged" in told
    assert "--checkpoint" in told
    assert main(["sample", run.job.dir, *words, "--checkpoint", "step-00000001"]) == 0


def test_one_process_samples_from_ddp_run(runs):
    runs.train("parallel=ddp", "launch.processes=2", "run.dir=r")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        *warm.make_command("gangline.cli.main", environment),
        "sample",
        "r",
        "--prompt",
        "the ",
        "--tokens",
        "12",
    ]
    done = subprocess.run(command, cwd=runs.directory, capture_output=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"the ")
    assert len(done.stdout) > 5
