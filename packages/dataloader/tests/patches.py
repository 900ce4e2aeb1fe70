"""Model edit `patches`: the first positions of a sequence are the patches of an image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from gangline import Part, Problem, hookimpl
from gangline.config import EditConfig, Run
from gangline.config.check import count_ranks
from gangline.mesh import Mesh
from gangline.model.linear_nodes import EmbeddingNode
from gangline.model.tree import iterate_nodes, replace_node
from gangline.plan import Init


@dataclass(frozen=True, kw_only=True)
class PatchNode(EmbeddingNode):
    module: ClassVar[str] = "patches_module:PatchEmbedding"
    patch: int

    def get_shapes(self) -> dict[str, tuple[int, ...]]:
        return {**super().get_shapes(), "patches": (self.dim, 3 * self.patch**2)}


@dataclass
class PatchConfig(EditConfig):
    """Patches of an image as embeddings."""

    patch: int = 8  # side length of a patch in pixels

    def check(self, run: Run) -> list[Problem]:
        mesh = Mesh.of(run.parallel.size_axes(count_ranks(run)))
        cut = mesh.size("cp") > 1 or (mesh.size("tp") > 1 and getattr(run.parallel, "sequence_parallel", False))
        if not cut:
            return []
        why = "An embedding then has a part of each sequence, and this one puts an image at its beginning."
        return [
            Problem(
                "patches=on does not know sequences that are cut over ranks.",
                why,
                "parallel.cp=1 parallel.sequence_parallel=false",
            )
        ]


def edit(tree: Any, plan: Any, options: PatchConfig) -> tuple[Any, Any, list[str]]:
    found = {path: node for path, node in iterate_nodes(tree) if type(node) is EmbeddingNode}
    for path, node in found.items():
        tree = replace_node(tree, path, PatchNode(vocab_size=node.vocab_size, dim=node.dim, patch=options.patch))
    inits = tuple(Init(f"{path}.patches", "normal", 0.02) for path in found)
    return tree, plan.extend(inits=inits), list(found)


@hookimpl
def gangline_model_edits() -> Iterable[Part]:
    yield Part(group="patches", name="on", config=PatchConfig, build="patches:edit", summary="Patches of an image")
