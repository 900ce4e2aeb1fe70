"""Rows sorted by expert and restored, compared with a loop over single pairs."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from gangline_moe.dispatch.permute import Combine, Permute, drop_over_capacity, sort_by_expert

CASES = {
    "usual": [[0, 2], [2, 1], [1, 0], [2, 0]],
    "an expert without tokens": [[0, 1], [1, 0], [0, 1]],
    "all to one": [[1], [1], [1]],
    "one token": [[2, 0]],
    "pairs without expert": [[0, 3], [3, 3], [2, 0]],
    "no pair at all": [[3, 3], [3, 3]],
}
EXPERTS = 3


@pytest.mark.parametrize("case", CASES)
def test_permute_and_combine_match_reference(case):
    expert = torch.tensor(CASES[case])
    whole = bool((expert < EXPERTS).all())
    made = sort_by_expert(expert, EXPERTS, whole)
    pairs = [(e, n) for n, row in enumerate(expert.tolist()) for e in row if e < EXPERTS]
    assert made.token_A.tolist() == [n for _, n in sorted(pairs)]
    assert made.counts.tolist() == [sum(e == i for e, _ in pairs) for i in range(EXPERTS)]
    x = torch.randn(len(expert), 5, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(expert.shape, dtype=torch.float64, requires_grad=True)
    gain = torch.tensor([2.0, 3.0, 5.0, 0.0], dtype=torch.float64)

    def through(x, weight):
        rows = Permute.apply(x, made) * gain[expert.flatten()[expert.flatten() < EXPERTS].sort().values][:, None]
        return Combine.apply(rows, weight, made)

    want = x * (weight * gain[expert]).sum(1, keepdim=True)
    torch.testing.assert_close(through(x, weight), want)
    assert gradcheck(through, (x, weight))


def test_combine_sums_in_wider_dtype():
    expert = torch.tensor([[0, 1]])
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    made = sort_by_expert(expert, 2)
    y = Combine.apply(rows, torch.tensor([[1.0, 1.0]]), made)
    assert y.dtype == torch.bfloat16
    assert Combine.apply(rows, torch.tensor([[1.0, 0.5]]), made).item() == 256.0


def test_capacity_keeps_earliest_tokens():
    expert = torch.tensor([[0, 1], [0, 2], [1, 0], [0, 1]])
    assert drop_over_capacity(expert, 3, 2).tolist() == [[0, 1], [0, 2], [1, 3], [3, 3]]
    assert torch.equal(drop_over_capacity(expert, 3, 4), expert)
    assert drop_over_capacity(drop_over_capacity(expert, 3, 2), 3, 1).tolist() == [[0, 1], [3, 2], [3, 3], [3, 3]]
