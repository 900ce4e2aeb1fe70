"""`mtp=on`: multi-token prediction loss against its formula, model edit suite, round trip of weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from family_files import ours, run_of, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters

from gangline import UserError
from gangline.batch import Batch
from gangline.config import Recompute
from gangline.config.check import check
from gangline.config.compose import compose, compose_one
from gangline.model.compose import compose_model
from gangline.model.forward_context import Collected, Frame, frame
from gangline.model.init import make_whole_model
from gangline.train.recompute_and_compile import make_finish
from gangline_basics.parallel.prepare import finish_head
from gangline_models.hugging_face.config import read_edited_config
from gangline_testkit import ModelEditSuite
from gangline_testkit.inputs import make_microbatch
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import read_lines, train_on_ranks, train_session


class TestOn(ModelEditSuite):
    choice = "mtp=on"


class TestTwoTokensAhead(ModelEditSuite):
    """The embedding is tied to the head, and two MTP modules use the matrix too."""

    choice = "mtp=on"
    model = ("model.tied=true", "model.z_loss=0.001")
    settings = ("mtp.depth=2", "mtp.weight=0.5")
    layouts = (2,)


def cross_entropies(model: torch.nn.Module, batch: Batch) -> list[Tensor]:
    """Sum the loss over counted targets one by one, for each depth (arXiv 2412.19437, equations 21 to 24)."""
    hidden, found = model.head.norm(model.hidden(batch)), []
    B, T = batch.shape
    for k, module in enumerate(model.head.mtp, 1):
        following = torch.zeros_like(batch.tokens)
        following[:, : T - k] = batch.tokens[:, k:]
        following[:, T - k] = batch.targets[:, T - 1]  # the last token of the row; later tokens are unknown
        merged = torch.cat(
            (module.embed_norm(F.embedding(following, model.embed.weight)), module.hidden_norm(hidden)), -1
        )
        hidden = module.block(merged @ module.merge.weight.T, batch)
        log_p = (module.head.norm(hidden) @ model.head.weight.T).log_softmax(-1)
        total = torch.zeros((), dtype=hidden.dtype)
        for b in range(B):
            for i in range(T - k):
                one_text = batch.document is None or batch.document[b, i] == batch.document[b, i + k]
                if one_text and batch.loss_mask[b, i + k]:
                    total = total - log_p[b, i, batch.targets[b, i + k]]
        found.append(total)
    return found


@pytest.mark.parametrize("kind", ["ragged", "documents"])
def test_mtp_loss_matches_paper(kind):
    run = build_small_run("mtp=on", "mtp.depth=2", "mtp.weight=0.5")
    model = make_whole_model(*compose_model(run), seed=3, dtype=torch.float64)
    plain = make_whole_model(*compose_model(replace(run, edits={})), seed=3, dtype=torch.float64)
    batch = make_microbatch([3, 8, 9], 0, 12, 61, kind)
    collected = Collected()
    with frame(Frame(loss_mask=batch.loss_mask, collected=collected)):
        loss = model(batch)
        loss.backward()
    assert loss.equal(plain(batch))  # the reported loss leaves out the MTP loss
    first, second = cross_entropies(model, batch)
    assert collected.losses[0, "", "mtp_loss"].item() == pytest.approx(0.25 * (first + second).item(), rel=1e-12)
    got = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    (plain.head(model.hidden(batch), batch) * 0 + model.eval()(batch) + 0.25 * (first + second)).backward()
    for name, weight in model.named_parameters():
        assert torch.allclose(got[name], weight.grad, rtol=1e-10, atol=1e-14), name


FINISHED = [("full", False, 2), ("selective", False, 1), pytest.param("none", True, None, marks=pytest.mark.nightly)]


@pytest.mark.parametrize(("recompute", "compiled", "calls"), FINISHED)
def test_mtp_blocks_are_recomputed_and_compiled(recompute: str, compiled: bool, calls: int | None) -> None:
    """Compare recomputed and compiled modules with plain modules.

    calls: number of times that a module projects its queries in a step, if nothing is compiled
    """
    counters.clear()
    run, batch, got = build_small_run("mtp=on", "mtp.depth=2"), make_microbatch([3, 8, 9], 0, 12, 61, "documents"), []
    tree, plan = compose_model(run)
    for finish in (make_finish(Recompute.none, False), make_finish(Recompute(recompute), compiled, seams=plan.seams)):
        model, counted, collected = make_whole_model(tree, plan, seed=3, dtype=torch.float64), list[str](), Collected()
        assert plan.list_blocks_in_head(dict(model.named_modules())) == ["head.mtp.0.block", "head.mtp.1.block"]
        finish_head(model, plan, finish)
        for module in model.head.mtp:
            module.block.attention.wq.register_forward_hook(lambda *_, counted=counted: counted.append("wq"))
        with frame(Frame(loss_mask=batch.loss_mask, collected=collected)):
            model(batch).backward()
        got.append(({name: weight.grad for name, weight in model.named_parameters()}, collected.losses, len(counted)))
    (want, losses, once), (found, again, times) = got
    assert once == 2
    assert calls is None or times == 2 * calls
    assert bool(counters["frames"]["ok"]) == compiled
    assert losses.keys() == again.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13)


def test_mtp_targets_stay_within_document():
    batch = Batch(
        tokens=torch.tensor([[1, 2, 3, 4, 5, 6]]),
        targets=torch.tensor([[2, 3, 4, 5, 6, 7]]),
        loss_mask=torch.tensor([[True, True, False, True, True, True]]),
        position=torch.tensor([[0, 1, 2, 0, 1, 2]]),
        sample=torch.tensor([0]),
        document=torch.tensor([[0, 0, 0, 1, 1, 1]]),
    )
    targets, counts = batch.shift_targets(1)
    assert targets[0, :5].tolist() == [3, 4, 5, 6, 7]
    assert counts.tolist() == [[True, False, False, True, True, False]]
    assert batch.shift_targets(9)[1].tolist() == [[False] * 6]


TRAINED = ("mtp=on", "mtp.depth=2", "run.steps=12", "optimizer.learning_rate=0.01", "model.tied=true", "checkpoint=off")


def test_mtp_loss_falls_and_is_logged_separately(tmp_path: Path):
    """Train on one process and on two, and check that the logged loss is the main model's alone."""
    assert train_session(tmp_path / "one", *TRAINED) == 0
    assert train_on_ranks(2, tmp_path / "two", *TRAINED, "parallel=ddp") == 0
    one, two = (read_lines(tmp_path / name, "metrics.jsonl") for name in ("one", "two"))
    first, last = one[0], one[-1]
    assert first["loss"] == pytest.approx(math.log(256), abs=0.5)
    for metric in ("mtp_loss", "mtp/1", "mtp/2"):
        assert last["metrics"][metric] < 0.9 * first["metrics"][metric]
    for alone, together in zip(one, two, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-12)
        for metric in ("mtp_loss", "mtp/1", "mtp/2"):
            assert together["metrics"][metric] == pytest.approx(alone["metrics"][metric], rel=1e-12)


def test_mtp_does_not_change_evaluation_and_logits():
    run = build_small_run("mtp=on")
    model = make_whole_model(*compose_model(run), seed=3, dtype=torch.float64).eval()
    plain = make_whole_model(*compose_model(replace(run, edits={})), seed=3, dtype=torch.float64).eval()
    batch = make_microbatch([3, 8], 0, 12, 61, "whole")
    assert model(batch).equal(plain(batch))
    assert model.compute_logits(batch).equal(plain.compute_logits(batch))


LATENT = (
    *(
        "model=deepseek_v3",
        "model.layers=2",
        "model.dim=16",
        "model.heads=2",
        "model.ffn_dim=24",
        "model.vocab_size=256",
    ),
    *("model.q_rank=8", "model.kv_rank=8", "model.nope_dim=4", "model.rope_dim=4", "model.v_dim=6"),
)


def test_mtp_weights_round_trip_with_deepseek_names(tmp_path: Path):
    run = deepseek("mtp.depth=2")
    model = make_whole_model(*compose_model(run), seed=3, dtype=torch.float32)
    directory = write(run, model, tmp_path / "out")
    names = set(load_file(directory / "model.safetensors"))
    for layer in (2, 3):
        behind = {name.removeprefix(f"model.layers.{layer}.") for name in names if f"layers.{layer}." in name}
        extra = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
        assert extra < behind
        assert behind - extra == {n.removeprefix("model.layers.1.") for n in names if "layers.1." in n}
    assert json.loads((directory / "config.json").read_text())["num_nextn_predict_layers"] == 2
    again = run_of(directory)
    assert again.edits["mtp"].depth == 2
    assert [*again.model.list_notices(again), *again.edits["mtp"].list_notices(again)] == []
    there = dict(ours(again).named_parameters())
    for name, weight in model.named_parameters():
        assert weight.equal(there[name]), name


def deepseek(*settings: str):
    (run,) = compose(["recipe=tiny", *LATENT, "mtp=on", *settings])
    return run


def test_missing_mtp_weights_are_initialized_or_refused(tmp_path: Path):
    run = deepseek("mtp.depth=2")
    directory = write(run, make_whole_model(*compose_model(run), seed=3, dtype=torch.float32), tmp_path / "out")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if "layers.3" not in n and "layers.2" not in n}, file, {"format": "pt"})
    assert read_edited_config(directory)[1] == []  # config.json declares the modules, but their weights are missing
    (drawn,) = compose(["recipe=tiny", *LATENT, "mtp=on", f"model.weights={directory}"])
    check(drawn)
    assert "they are initialised randomly" in "".join(drawn.edits["mtp"].list_notices(drawn))
    merge = dict(ours(drawn).named_parameters())["head.mtp.0.merge.weight"]
    assert 0 < merge.std() < 0.1
    save_file({n: t for n, t in tensors.items() if "layers.3" not in n}, file, {"format": "pt"})
    (half,) = compose(["recipe=tiny", *LATENT, "mtp=on", "mtp.depth=2", f"model.weights={directory}"])
    with pytest.raises(UserError, match="holds only some of the weights"):
        check(half)
    (one,) = compose(["recipe=tiny", *LATENT, "mtp=on", f"model.weights={directory}"])
    check(one)
    (none,) = compose(["recipe=tiny", *LATENT, f"model.weights={directory}"])
    assert "model.layers.2.*" in "".join(none.model.list_notices(none))


def test_leftover_weight_file_adds_no_mtp_modules(tmp_path: Path):
    """Check a directory with a weight file that an older download left there."""
    run = deepseek()
    directory = write(run, make_whole_model(*compose_model(run), seed=3, dtype=torch.float32), tmp_path / "out")
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors, directory / "model-00001-of-00002.safetensors", {"format": "pt"})
    own = {name: tensor for name, tensor in tensors.items() if "layers.2." not in name}
    save_file(own, directory / "model.safetensors", {"format": "pt"})
    assert read_edited_config(directory)[1] == []
    (again,) = compose(["recipe=tiny", *LATENT, "mtp=on", f"model.weights={directory}"])
    assert "they are initialised randomly" in "".join(again.edits["mtp"].list_notices(again))


def test_export_of_other_family_omits_mtp(tmp_path: Path):
    (run,) = compose(["recipe=tiny", "mtp=on", "model.dim=24", "model.layers=1"])
    assert "an export omits the MTP weights" in "".join(run.edits["mtp"].list_notices(run))
    model = make_whole_model(*compose_model(run), seed=3, dtype=torch.float32)
    directory = write(run, model, tmp_path / "out")
    assert not any("layers.1." in name or "mtp" in name for name in load_file(directory / "model.safetensors"))
    assert "num_nextn_predict_layers" not in json.loads((directory / "config.json").read_text())
    again = run_of(directory)
    assert again.edits == {}
    trained = dict(model.named_parameters())
    for name, weight in ours(again).named_parameters():
        assert weight.equal(trained[name]), name


def test_unsupported_mtp_options_are_refused():
    with pytest.raises(UserError, match="depth=12: too large for rows of 12 tokens"):
        check(build_small_run("mtp=on", "mtp.depth=12"))
    with pytest.raises(UserError, match="mup=on does not support the head"):
        compose_model(build_small_run("mtp=on", "mup=on"))
    with pytest.raises(UserError, match="mtp=on does not support the embedding of this model"):
        compose_model(compose_one(["model=gpt2", "mtp=on"]))
