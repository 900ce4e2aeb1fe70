"""Hugging Face names of the arrays of a layer with experts. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline.plan import Name
from gangline_moe.interop.architectures import MIXTRAL
from gangline_moe.interop.format import missing

if TYPE_CHECKING:
    from gangline_moe.config import MoeOptions


def names_of_experts(place: str, options: MoeOptions, qk_norm: bool, biased: Sequence[str] = ()) -> tuple[Name, ...]:
    """Return the names of a layer's arrays at `place` ("blocks.*.feed_forward").

    biased: linears of experts that have a bias.
    """
    if biased:
        return _gpt_oss_names(place, options)
    theirs = "model.layers.{0}.mlp"
    words = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
    if not qk_norm and not missing(MIXTRAL, options, {}):
        theirs, words = "model.layers.{0}.block_sparse_moe", {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}
    found = [Name(f"{place}.router.gate.weight", f"{theirs}.gate.weight")]
    found += [
        Name(f"{place}.experts.{o}.weight", f"{theirs}.experts.{{n}}.{t}.weight", "stack") for o, t in words.items()
    ]
    if options.shared:
        shared = f"{theirs}.shared_expert" + ("" if options.shared_gate else "s")
        found += [Name(f"{place}.shared.{o}.weight", f"{shared}.{t}.weight") for o, t in words.items()]
    if options.shared_gate:
        found.append(Name(f"{place}.shared_gate.weight", f"{theirs}.shared_expert_gate.weight"))
    if options.router.bias_rate:
        found.append(Name(f"{place}.router.bias", f"{theirs}.gate.e_score_correction_bias"))
    if options.router.step_loss:
        found.append(Name(f"{place}.router.share", ""))
    return tuple(found)


def _gpt_oss_names(place: str, options: MoeOptions) -> tuple[Name, ...]:
    """Experts stacked and transposed, the columns of gate and up-projection in turns."""
    hidden, theirs = 2 * (options.hidden or 0), "model.layers.{0}.mlp"
    found = [Name(f"{place}.router.gate.{leaf}", f"{theirs}.router.{leaf}") for leaf in ("weight", "bias")]
    for first, name in enumerate(("w_gate", "w_up")):
        ours, both, rows = f"{place}.experts.{name}", f"{theirs}.experts.gate_up_proj", (first, hidden)
        found.append(Name(f"{ours}.weight", both, "transpose", rows, every=2, dim=1))
        found.append(Name(f"{ours}.bias", f"{both}_bias", "same", rows, every=2, dim=1))
    found.append(Name(f"{place}.experts.w_down.weight", f"{theirs}.experts.down_proj", "transpose"))
    found.append(Name(f"{place}.experts.w_down.bias", f"{theirs}.experts.down_proj_bias"))
    return (*found, *([Name(f"{place}.router.share", "")] if options.router.step_loss else []))
