"""`callback=ema`: average formula, resume, layout invariance, validation and sampling with averaged weights."""

from __future__ import annotations

import pytest
import torch

from gangline.config.check import check
from gangline.errors import UserError
from gangline.plugin.registry import build
from gangline.run.directory import RunDirectory
from gangline.train.callbacks import call_each
from gangline.train.loop import step
from gangline.train.report import Clock
from gangline_basics.sampling.command import main as sample_command
from gangline_basics.sampling.sampler import load_model, sample
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import open_session, read_lines, train_on_ranks, train_session

EMA = ("callback=ema", "callback.ema.decays=[0.5,0.9]", "run.deterministic=true", "batch.micro_size=1")


def held(s, prefix="callback/ema/") -> dict[str, torch.Tensor]:
    """Return copies of the local arrays whose name starts with `prefix`, by name."""
    return {shard.name: shard.local.detach().clone() for shard in s.shards() if shard.name.startswith(prefix)}


def same_bits(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    assert one
    assert not [name for name in one if not torch.equal(one[name], two[name])]


def test_ema_is_bias_corrected_and_ignores_skipped_steps(tmp_path):
    """Check that the initial weights do not contribute (bias correction), and that a skipped step changes no bit."""
    s = open_session(tmp_path / "out", *EMA)
    seen: list[dict[str, torch.Tensor]] = []
    for number in range(4):
        record, *_ = step(s, Clock())
        before = held(s)
        applied = number != 2
        call_each(s, "after_step", record, applied)
        if not applied:
            same_bits(held(s), before)
            continue
        seen.append({name.removeprefix("model/"): weight for name, weight in held(s, "model/").items()})
        for name, average in held(s).items():
            _, _, decay, parameter = name.split("/")
            d, t = float(decay), len(seen)
            sums = sum(d ** (t - 1 - i) * weights[parameter] for i, weights in enumerate(seen))
            torch.testing.assert_close(average, sums * (1 - d) / (1 - d**t), rtol=1e-12, atol=1e-14)
    assert s.callbacks["ema"].state() == {"updates": {"0.5": 3, "0.9": 3}}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Directory of a run of one process, which sums gradients in the order of two data ranks."""
    out = tmp_path_factory.mktemp("straight") / "out"
    train_session(out, *EMA, "run.steps=6", "validate.every=1", "parallel.groups=2")
    return out


def test_average_is_bit_identical_under_ddp(straight, tmp_path):
    train_on_ranks(2, tmp_path / "ddp", *EMA, "run.steps=6", "parallel=ddp")
    same_bits(held(open_session(tmp_path / "ddp", *EMA)), held(open_session(straight, *EMA)))


def test_resume_may_add_ema_with_another_decay(tmp_path):
    """Check that each average counts its own updates, and that a new average starts from the current weights."""
    train_session(tmp_path / "out", "run.steps=2")
    train_session(tmp_path / "out", "callback=ema", "callback.ema.decays=[0.5]", "run.steps=4")
    late = open_session(tmp_path / "out", "callback=ema", "callback.ema.decays=[0.5,0.9]", "run.steps=6")
    assert late.callbacks["ema"].state() == {"updates": {"0.5": 2, "0.9": 0}}
    assert ["lacks arrays of callback=ema" in note for note in late.notes] == [True]
    new = {name.rpartition("/")[2]: array for name, array in held(late, "callback/ema/0.9/").items()}
    same_bits(new, {name.removeprefix("model/"): array for name, array in held(late, "model/").items()})


def test_validation_loss_of_average_is_recorded(straight, tmp_path):
    records = read_lines(straight, "metrics.jsonl")
    assert {frozenset(record["validation_losses"]) for record in records} == {frozenset(("ema/0.5", "ema/0.9"))}
    assert records[0]["validation_losses"]["ema/0.9"] == records[0]["validation_loss"], "of one step it is the weights"
    assert records[-1]["validation_losses"]["ema/0.9"] != records[-1]["validation_loss"]
    train_session(tmp_path / "out", *EMA, "callback.ema.validate=false", "run.steps=1", "validate.every=1")
    assert read_lines(tmp_path / "out", "metrics.jsonl")[0]["validation_losses"] == {}


def test_sample_command_reads_ema_weights_by_prefix(straight, capsys):
    run = RunDirectory.open(str(straight)).run()
    kept = build(run.checkpoint, run, None)
    averages = held(open_session(straight, *EMA), "callback/ema/0.9/")
    model = load_model(run, kept, kept.find_latest(), "cpu", "callback/ema/0.9")
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, averages[f"callback/ema/0.9/{name}"].float(), rtol=1e-6, atol=1e-7)

    words = ["--tokens", "4", "--temperature", "0", "--prompt", "the"]
    sample_command([str(straight), *words, "--weights", "callback/ema/0.9"])
    assert capsys.readouterr().out == sample(straight, "the", 4, temperature=0, weights="callback/ema/0.9") + "\n"

    with pytest.raises(
        UserError, match=r"no weights under callback/ema/0.7.\n.*model, callback/ema/0.5, callback/ema/0.9"
    ):
        sample(straight, weights="callback/ema/0.7")
    with pytest.raises(UserError, match="no weights under optimizer/exp_avg"):
        sample(straight, weights="optimizer/exp_avg")


@pytest.mark.parametrize(
    ("decays", "message"),
    [
        ("[1.0]", "must each be more than 0 and less than 1"),
        ("[]", "decays is empty"),
        ("[0.9,0.9]", "contains 0.9 twice"),
    ],
)
def test_invalid_decays_are_refused(decays, message):
    with pytest.raises(UserError, match=message):
        check(build_small_run("callback=ema", f"callback.ema.decays={decays}"))
