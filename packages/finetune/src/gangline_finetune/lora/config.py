"""The options of `lora=on`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from gangline import Problem
from gangline.config import AtLeast, EditConfig, LessThan, PositiveFloat, PositiveInt, holds_checkpoint
from gangline.model import Adapter

if TYPE_CHECKING:
    import torch

    from gangline.config import Run
    from gangline.model import Plan
    from gangline.strategy import Shard


@dataclass
class LoraConfig(EditConfig):
    """Beside each linear W of the targets a product of two narrow matrices is trained, and nothing else is.

        y = W x + scale · B A x        A (rank, in) drawn, B (out, rank) zero: the model begins as it was

    scale is alpha / rank (Hu et al., arXiv 2106.09685, section 4.1), or with `rslora` alpha / sqrt(rank) (arXiv
    2312.03732). With `dora` each row of W + scale · B A has a length that is trained by itself (arXiv 2402.09353).
    """

    wraps: ClassVar[bool] = True
    file_options: ClassVar[tuple[str, ...]] = ("adapter",)

    rank: PositiveInt = 8  # of B A
    alpha: PositiveFloat = 16.0  # B A x is multiplied by alpha / rank
    targets: list[str] = field(default_factory=lambda: ["*"])  # linears by their last name (wq) or path; * is any
    dropout: Annotated[float, AtLeast(0), LessThan(1)] = 0.0  # share of the features of x that A does not see
    rslora: bool = False  # alpha / sqrt(rank) in place of alpha / rank
    dora: bool = False  # directions and lengths of rows are trained apart

    adapter: str | None = None  # a directory of peft's to start from; null: drawn anew

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def check(self, run: Run) -> list[Problem]:
        """Whether the adapter to start from is of this base and these options."""
        from gangline_finetune.lora.start import problems

        return [] if self.adapter is None or holds_checkpoint(run) else problems(self, run)

    def first_weights(self, run: Run, shards: Sequence[Shard], plan: Plan) -> None:
        if self.adapter is None:
            return
        from gangline_finetune.lora.load import load
        from gangline_finetune.lora.start import names_and_shapes

        names, shapes, _ = names_and_shapes(run)
        load(self.adapter, names, shapes, shards, plan, run.model.pretrained())

    def merged(self, name: str, weight: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from gangline_finetune.lora.merge import merged

        return merged(name, weight, stored, self.scale)

    def apart(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> Adapter:
        """As peft keeps it."""
        from gangline_finetune.lora.lengths import whole_lengths
        from gangline_finetune.lora.peft import CONFIG, config_of, names_of

        files = {CONFIG: config_of(self, shapes, plan)}
        change = whole_lengths if self.dora else None
        return Adapter(names_of(shapes, plan), files, base=(CONFIG, "base_model_name_or_path"), change=change)
