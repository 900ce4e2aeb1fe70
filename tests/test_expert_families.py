"""Model families with experts together with gangline-moe: module tree, names, parameter counts, generation.

The two packages do not import each other.
"""

from __future__ import annotations

import copy

import pytest
import torch
from family_cases import ROUTED, SPARSE
from family_files import ours, run_of
from family_suite import AbsentFields, FamilySuite, OddFields

from gangline import UserError
from gangline.config.compose import compose_one
from gangline.model.compose import compose_model
from gangline.model.flops import count_parameters
from gangline.runtime import Sampling
from gangline_basics.model.seams import list_recomputed
from gangline_basics.sampling.sampler import generate
from gangline_models.hugging_face.config import read_model_config


class TestFamilies(FamilySuite):
    cases = tuple(ROUTED)

    def test_refusal_without_moe_edit_names_package(self, family, saved):
        with pytest.raises(UserError) as refused:
            read_model_config(saved(family)[1])
        assert "pip install gangline-moe" in str(refused.value)

    def test_greedy_tokens_match_transformers(self, family, saved):
        model, directory = saved(family)
        run = run_of(directory)
        assert list_recomputed(compose_model(run)[0]) == []
        wide = copy.deepcopy(model).double()
        wide.set_experts_implementation("eager")  # their grouped matmul takes no float64
        starts = torch.randint(2, 97, (2, 9), generator=torch.Generator().manual_seed(11))
        with torch.no_grad():
            expected = wide.generate(starts, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
        found = generate(ours(run, torch.float64), starts.tolist(), Sampling(tokens=30), cached=True)
        assert [one.tokens for one in found] == expected[:, 9:].tolist()


class TestAbsentFields(AbsentFields):
    cases = tuple(ROUTED)


class TestOddFields(OddFields):
    cases = (*ROUTED, *SPARSE)
    sample = "deepseek-v3"
    fields = (
        ("n_group", 3),
        ("topk_group", 0),
        ("first_k_dense_replace", -1),
        ("num_experts_per_tok", 99),
        ("n_routed_experts", 10**9),
        ("moe_intermediate_size", "12"),
        ("routed_scaling_factor", None),
    )


@pytest.mark.parametrize(
    ("words", "count"),
    [  # as counted in the files, buffers of routers left out
        ("model=gpt-oss-20b moe=gpt_oss_20b", 20_914_757_184),
        ("model=gpt-oss-120b moe=gpt_oss_120b", 116_829_156_672),
        ("model=deepseek-v3 moe=deepseek_v3", 671_026_419_200 - 58 * 256),
        ("model=qwen3-next-80b moe=qwen3_next_80b", 79_674_391_296),
    ],
)
def test_published_shapes_have_published_parameter_counts(words, count):
    assert count_parameters(compose_model(compose_one(words.split()))[0]) == count
