"""Options of `lora=on`. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from gangline import Problem
from gangline.config import EditConfig, PositiveFloat, PositiveInt
from gangline.model.adapter import Adapter

if TYPE_CHECKING:
    import torch

    from gangline.config import Run
    from gangline.plan import Plan
    from gangline.shard import Shard


@dataclass
class LoraConfig(EditConfig):
    """Options of `lora=on`: train low-rank matrices A and B next to each target linear W, and freeze everything else.

        y = W x + scale · B A x        A (rank, in) random, B (out, rank) zero: the initial model is unchanged

    scale is alpha / rank (Hu et al., arXiv 2106.09685, section 4.1), or with `rslora` alpha / sqrt(rank) (arXiv
    2312.03732). With `dora` the L2 norm of each row of W + scale · B A is trained separately (arXiv
    2402.09353).
    """

    wraps: ClassVar[bool] = True
    file_options: ClassVar[tuple[str, ...]] = ("adapter",)

    rank: PositiveInt = 8  # LoRA rank of the matrices A and B
    alpha: PositiveFloat = 16.0  # LoRA alpha: B A x is scaled by alpha / rank (rslora: alpha / sqrt(rank))
    # target linear layers: full path or last path component (wq); *: all linear layers
    targets: list[str] = field(default_factory=lambda: ["*"])
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0  # dropout probability of the adapter's input features
    rslora: bool = False  # rank-stabilised LoRA: scale alpha / sqrt(rank) instead of alpha / rank
    dora: bool = False  # DoRA: train the row norms (magnitudes) of the weights separately
    base: Literal["full", "bf16", "8bit"] = "full"  # storage of frozen weights; full: dtype of the precision

    adapter: str | None = None  # directory of a peft adapter to start from; null: a new adapter (A random, B zero)

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    def check(self, run: Run) -> list[Problem]:
        """Return problems of `base` and of `adapter`, such as an adapter with another base model or other options."""
        from gangline.run.directory import holds_checkpoint
        from gangline_finetune.lora.start import find_adapter_problems

        problems = self._find_base_problems(run)
        return (
            problems if problems or self.adapter is None or holds_checkpoint(run) else find_adapter_problems(self, run)
        )

    def _find_base_problems(self, run: Run) -> list[Problem]:
        what, matmul_format = f"lora.base={self.base}", run.precision.get_matmul_format()
        if self.base != "full" and matmul_format == "fp16":
            why = "bfloat16 has a larger range than float16, so large weights would overflow to infinity."
            return [Problem(f"{what} is not supported with matmuls in float16.", why, "precision=bf16")]
        if self.base == "8bit" and matmul_format not in ("bf16", "fp32", "fp64"):
            why = "The weights would be rounded a second time, to the format of the matmuls."
            fix = "precision=bf16, or lora.base=bf16"
            return [Problem(f"{what} is not supported with matmuls in {matmul_format}.", why, fix)]
        if self.base == "8bit" and run.job.compile:
            why = "torch.compile does not support weights that are stored as 8-bit codes."
            return [
                Problem(f"{what} is not supported with run.compile=true.", why, "run.compile=false, or lora.base=bf16")
            ]
        return []

    def list_notices(self, run: Run) -> list[str]:
        """Return notices of adapters that peft does not support: an export after training would refuse them."""
        from gangline.model.compose import compose_model
        from gangline.model.tree import get_parameter_shapes
        from gangline_finetune.lora.peft import split_unsupported_linears

        tree, plan = compose_model(run)
        other, same = split_unsupported_linears(get_parameter_shapes(tree), plan)
        if not other:
            return []
        names = ", ".join(other)
        what = f"gangline export --adapter-only lora will refuse this run: peft does not support adapters of {names}"
        advice = f"lora.targets=[{','.join(same)}] excludes these linears; " if same else ""
        return [
            f"{what}, because Hugging Face files join or split the weights. {advice}--merge exports merged weights."
        ]

    def fill_init_weights(self, run: Run, shards: Sequence[Shard], plan: Plan) -> None:
        if self.adapter is None:
            return
        from gangline.shard import parse_parameter

        shards = [shard for shard in shards if not plan.is_frozen(parse_parameter(shard.name))]
        if not shards:
            return  # only base weights are requested: the adapter directory may be missing
        from gangline_finetune.lora.load import load
        from gangline_finetune.lora.start import compose_names_and_shapes

        names, shapes, _ = compose_names_and_shapes(run)
        load(self.adapter, names, shapes, shards, plan, run.model.get_weights_directory())

    def merge(self, name: str, weight: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from gangline_finetune.lora.merge import merge_adapter

        return merge_adapter(name, weight, stored, self.scale)

    def extract_adapter(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> Adapter:
        """Return the adapter in peft's format."""
        from gangline_finetune.lora.lengths import compute_lengths
        from gangline_finetune.lora.peft import CONFIG, make_adapter_config, map_names

        files = {CONFIG: make_adapter_config(self, shapes, plan)}
        change = compute_lengths if self.dora else None
        return Adapter(map_names(shapes, plan), files, base=(CONFIG, "base_model_name_or_path"), change=change)
