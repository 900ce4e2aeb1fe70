"""Width of the activations that a pipeline sends, including embeddings that read more than tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from torch import nn

from gangline import UserError
from gangline.model.compose import compose_model
from gangline.model.linear import Embedding
from gangline.model.linear_nodes import EmbeddingNode
from gangline.model.tree import Node
from gangline_parallel_megatron_style.build import probe_width
from gangline_testkit.runs import build_small_run


class Pixels(Embedding):
    """Embedding that also reads pixels from the batch."""

    def forward(self, batch):
        return super().forward(batch) + batch.extra["pixels"]


@dataclass(frozen=True, kw_only=True)
class Unsaid(Node):
    """Node that does not declare the width of its output."""

    module: ClassVar[str] = f"{__name__}:Pixels"


def model_with(embedding: nn.Module) -> nn.Module:
    model = nn.Module()
    model.embed = embedding.to("meta")
    return model


def test_model_width_comes_from_embedding_output_or_node():
    tree, plan = compose_model(build_small_run("model.dim=24"))
    node = EmbeddingNode(vocab_size=61, dim=24)
    assert probe_width(model_with(Embedding(node)), plan, tree) == 24
    assert probe_width(model_with(Pixels(node)), plan, tree) == 24


def test_embedding_of_unknown_width_is_refused():
    tree, plan = compose_model(build_small_run("model.dim=24"))
    odd = replace(tree, **{plan.embed: Unsaid()})
    with pytest.raises(UserError, match=r"embed reads 'pixels' of the batch"):
        probe_width(model_with(Pixels(EmbeddingNode(vocab_size=61, dim=24))), plan, odd)
