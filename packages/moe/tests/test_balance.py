"""Load-balancing losses and bias: comparison with their equations, and an even expert load as a result."""

from __future__ import annotations

import pytest
import torch
from test_layer import collected, layer, x_of

from gangline_moe.balance import compute_entropy, compute_sequence_loss, compute_step_loss, compute_z_loss
from gangline_moe.config import MoeOptions
from gangline_moe.routers.base import Choice
from gangline_moe.routers.config import Sigmoid, Softmax

B, T, E, K = 3, 5, 4, 2
ALL = torch.ones(B, T, dtype=torch.bool)


def choice_of():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B * T, E, generator=generator, dtype=torch.float64)
    prob = logits.softmax(-1)
    return Choice(prob.topk(K).indices, prob.topk(K).values, prob, logits)


def test_sequence_loss_matches_formula():
    choice = choice_of()
    want = 0.0
    for b in range(B):
        own = slice(b * T, (b + 1) * T)
        for i in range(E):
            f = E / (K * T) * (choice.expert_Nk[own] == i).sum()
            want += T * f * choice.prob_NE[own, i].mean()
    torch.testing.assert_close(compute_sequence_loss(choice, ALL), torch.as_tensor(want))


def test_even_load_has_minimal_balancing_loss():
    """Compare with T for each sequence, and with E · 1/E for each token of the batch."""
    even = torch.full((4, E), 1 / E, dtype=torch.float64)
    choice = Choice(torch.tensor([[0, 1], [2, 3], [0, 1], [2, 3]]), even[:, :2], even, even)
    assert float(compute_sequence_loss(choice, ALL[:1, :4])) == pytest.approx(4)
    assert float(compute_step_loss(even, even[0], ALL.view(-1)[:4])) == pytest.approx(4)
    assert float(compute_entropy(even)[0]) == pytest.approx(torch.tensor(4.0).log())


def test_step_loss_and_z_loss_match_formulas():
    choice, share = choice_of(), torch.tensor([0.5, 0.25, 0.25, 0.0])
    want = sum(E * share[i] * choice.prob_NE[n, i] for n in range(B * T) for i in range(E))
    torch.testing.assert_close(compute_step_loss(choice.prob_NE, share, ALL.view(-1)), want)
    torch.testing.assert_close(
        compute_z_loss(choice.logits_NE, ALL.view(-1)), choice.logits_NE.exp().sum(-1).log().square().sum()
    )


def test_router_losses_are_collected_in_training_only():
    router = Softmax(seq_aux_loss=0.1, global_aux_loss=0.2, z_loss=0.3)
    module, x = layer(router), x_of().requires_grad_()
    _, told = collected(module, x)
    assert {"seq_aux_loss", "global_aux_loss", "z_loss", "load", "entropy"} <= told.keys()
    choice = module.router(x)
    torch.testing.assert_close(told["z_loss"], 0.3 * choice.logits_NE.logsumexp(-1).square().sum().detach())
    module.eval()
    assert "z_loss" not in collected(module, x)[1]


def test_masked_tokens_do_not_change_balancing_losses():
    """Add twice as much padding after the tokens and compare with the losses without padding."""
    router = Softmax(seq_aux_loss=0.1, global_aux_loss=0.2, z_loss=0.3)
    module, x = layer(router), x_of()
    (B, T), names = x.shape[:2], ("seq_aux_loss", "global_aux_loss", "z_loss")
    _, alone = collected(module, x)
    padded = torch.cat((x, torch.ones(B, 2 * T, x.shape[2], dtype=x.dtype)), 1)
    counts = torch.arange(3 * T).expand(B, 3 * T) < T
    _, told = collected(module, padded, loss_mask=counts)
    for name in names:
        torch.testing.assert_close(told[name], alone[name])
    _, nothing = collected(module, padded, loss_mask=torch.zeros_like(counts))
    assert [float(nothing[name]) for name in names] == [0, 0, 0]


def test_after_step_updates_balancing_bias_and_load_shares():
    module = layer(Sigmoid(global_aux_loss=0.1, bias_rate=0.5), experts=4)
    module.router.bias.zero_()
    module.router.after_step({"load": torch.tensor([4.0, 0.0, 2.0, 2.0], dtype=torch.float64)})
    assert module.router.bias.tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert module.router.share.tolist() == [0.5, 0.0, 0.25, 0.25]
    module.router.after_step({})
    assert module.router.bias.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_bias_changes_expert_choice_but_not_weights():
    module, x = layer(Sigmoid(renormalise=False), experts=4, top_k=1), x_of()
    module.router.bias.zero_()
    score = module.router(x).logits_NE.sigmoid()
    module.router.bias[2] = 5.0
    choice = module.router(x)
    assert choice.expert_Nk.eq(2).all()
    torch.testing.assert_close(choice.weight_Nk[:, 0], score[:, 2])


def test_balancing_bias_evens_expert_load():
    module, x = layer(Sigmoid(bias_rate=0.02), experts=8), x_of(64) + 1
    module.router.bias.zero_()
    first = collected(module, x)[1]["load"]
    for _ in range(200):
        module.router.after_step({"load": collected(module, x)[1]["load"].double()})
    last = collected(module, x)[1]["load"]
    assert first.max() / first.double().mean() > 1.5
    assert last.max() / last.double().mean() < 1.3


def test_step_summary_reports_imbalance():
    told = MoeOptions().summarise({"blocks.0/load": [3.0, 1.0], "blocks.1/load": [2.0, 2.0], "blocks.1/entropy": 0.1})
    assert told == {"blocks.0/imbalance": 1.5, "blocks.1/imbalance": 1.0, "moe/imbalance": 1.5}
    assert MoeOptions().summarise({"blocks.0/load": [0.0, 0.0]}) == {}


def test_load_counts_all_tokens_except_padding():
    """Check that the bias moves as if rows had no padding, with any loss mask."""
    module, x = layer(Sigmoid(bias_rate=0.1, global_aux_loss=0.1)), x_of()
    B, T, D = x.shape
    _, alone = collected(module, x)
    padded = torch.cat((x, x.new_full((B, 3 * T, D), 5.0)), 1)
    behind = torch.arange(4 * T).expand(B, 4 * T) >= T
    for counts in (~behind, torch.zeros_like(behind)):
        _, told = collected(module, padded, loss_mask=counts, padding=behind)
        assert told["load"].tolist() == alone["load"].tolist()
    _, without = collected(module, padded)
    assert without["load"].sum() == 4 * alone["load"].sum(), "what only fills up would weigh most"
    assert (
        collected(module, x, padding=torch.zeros(B, T, dtype=torch.bool))[1]["load"].tolist() == alone["load"].tolist()
    )
