"""LoRA modules in one process: dropout masks of the adapters in a block."""

from __future__ import annotations

import torch

from gangline.config.compose import compose_one
from gangline.model import forward_context
from gangline.model.build import construct
from gangline.model.compose import compose_model
from gangline_finetune.lora.modules import DroppedLowRank


def test_adapters_of_one_block_have_different_dropout_masks():
    """Check masks whose random key contains the block and the path of the linear layer."""
    run = compose_one(["recipe=quick", "lora=on", "lora.dropout=0.5", "model.layers=2"])
    model = construct(compose_model(run)[0]).train()
    kept: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, DroppedLowRank):
            with (
                forward_context.frame(forward_context.Frame()),
                forward_context.emit_under(".".join(name.split(".")[:2])),
            ):
                found = module.drop_inputs(torch.ones(1, 16, module.in_features)) > 0
                again = module.drop_inputs(torch.ones(1, 16, module.in_features)) > 0
            assert torch.equal(found, again)
            kept.setdefault(tuple(found.shape), []).append(found)
    assert sum(map(len, kept.values())) >= 14
    for same in kept.values():
        for number, one in enumerate(same):
            for other in same[:number]:
                assert 0.3 < (one == other).float().mean() < 0.7, "two adapters drop alike"
