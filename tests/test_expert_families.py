"""Families with experts: a family's tree and names and gangline-moe's, which know nothing of each other, fit."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from family_cases import ROUTED, theirs
from family_files import Files, compare_logits, compare_there_and_back, ours, run_of

from gangline import UserError
from gangline.config.compose import compose_one
from gangline.interop import model_config_from
from gangline.interop.config import edited_config_from
from gangline.model import compose_model, parameter_count
from gangline.model.seams import recomputed
from gangline.sampling.options import Sampling
from gangline.sampling.sampler import generate


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name -> their model, and the directory that it was saved in."""
    made: dict[str, tuple] = {}

    def save(name: str):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            model = theirs(name)
            model.save_pretrained(directory)
            made[name] = model, directory
        return made[name]

    return save


@pytest.mark.parametrize("name", ROUTED)
def test_logits_are_theirs(name, saved):
    compare_logits(*saved(name))


@pytest.mark.parametrize("name", ROUTED)
def test_there_and_back_is_bit_exact_and_transformers_opens_it(name, saved, tmp_path):
    compare_there_and_back(*saved(name), tmp_path / "out")


@pytest.mark.parametrize("name", ROUTED)
def test_greedy_tokens_are_theirs(name, saved):
    model, directory = saved(name)
    run = run_of(directory)
    assert recomputed(compose_model(run)[0]) == []
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # their grouped product takes no float64
    starts = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        expected = wide.generate(starts, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = generate(ours(run, torch.float64), starts.tolist(), Sampling(tokens=30), cached=True)
    assert [one.tokens for one in found] == expected[:, 9:].tolist()


@pytest.mark.parametrize("name", ROUTED)
def test_what_is_absent_or_null_is_what_transformers_has_for_it(name, tmp_path):
    assert Files(name, tmp_path).all_wrong() == {}


@pytest.mark.parametrize("name", ROUTED)
def test_an_unknown_field_is_refused_by_name(name, saved, tmp_path):
    content = json.loads((saved(name)[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"sandwich_multiplier": 2.0}))
    with pytest.raises(UserError, match=r"sandwich_multiplier=2\.0"):
        edited_config_from(tmp_path)


@pytest.mark.parametrize(
    ("words", "count"),
    [  # as counted in the files, buffers of routers left out
        ("model=gpt-oss-20b moe=gpt_oss_20b", 20_914_757_184),
        ("model=gpt-oss-120b moe=gpt_oss_120b", 116_829_156_672),
        ("model=deepseek-v3 moe=deepseek_v3", 671_026_419_200 - 58 * 256),
        ("model=qwen3-next-80b moe=qwen3_next_80b", 79_674_391_296),
    ],
)
def test_a_published_shape_has_as_many_parameters(words, count):
    assert parameter_count(compose_model(compose_one(words.split()))[0]) == count


@pytest.mark.parametrize("name", ROUTED)
def test_without_the_edit_the_refusal_says_who_supplies_it(name, saved):
    with pytest.raises(UserError) as refused:
        model_config_from(saved(name)[1])
    assert "pip install gangline-moe" in str(refused.value)
