"""Hugging Face names of the tensors of an MoE layer. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline.plan import HFName
from gangline_moe.interop.architectures import MIXTRAL
from gangline_moe.interop.format import list_missing_overrides

if TYPE_CHECKING:
    from gangline_moe.config import MoeOptions


def list_expert_names(place: str, options: MoeOptions, qk_norm: bool, biased: Sequence[str] = ()) -> tuple[HFName, ...]:
    """Return the Hugging Face names of the tensors of the MoE layers at `place` ("blocks.*.feed_forward").

    biased: names of the experts' linears that have a bias.
    """
    if biased:
        return _list_gpt_oss_names(place, options)
    hf_prefix = "model.layers.{0}.mlp"
    words = {"w_gate": "gate_proj", "w_up": "up_proj", "w_down": "down_proj"}
    if not qk_norm and not list_missing_overrides(MIXTRAL, options, {}):
        hf_prefix, words = "model.layers.{0}.block_sparse_moe", {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}
    names = [HFName(f"{place}.router.gate.weight", f"{hf_prefix}.gate.weight")]
    names += [
        HFName(f"{place}.experts.{o}.weight", f"{hf_prefix}.experts.{{n}}.{t}.weight", "stack")
        for o, t in words.items()
    ]
    if options.shared:
        shared_prefix = f"{hf_prefix}.shared_expert" + ("" if options.shared_gate else "s")
        names += [HFName(f"{place}.shared.{o}.weight", f"{shared_prefix}.{t}.weight") for o, t in words.items()]
    if options.shared_gate:
        names.append(HFName(f"{place}.shared_gate.weight", f"{hf_prefix}.shared_expert_gate.weight"))
    if options.router.bias_rate:
        names.append(HFName(f"{place}.router.bias", f"{hf_prefix}.gate.e_score_correction_bias"))
    if options.router.global_aux_loss:
        names.append(HFName(f"{place}.router.share", ""))
    return tuple(names)


def _list_gpt_oss_names(place: str, options: MoeOptions) -> tuple[HFName, ...]:
    """Return the names of gpt-oss: weights stacked and transposed, columns of gate and up-projection interleaved."""
    hidden, hf_prefix = 2 * (options.ffn_dim or 0), "model.layers.{0}.mlp"
    names = [HFName(f"{place}.router.gate.{leaf}", f"{hf_prefix}.router.{leaf}") for leaf in ("weight", "bias")]
    for first, name in enumerate(("w_gate", "w_up")):
        module, both, rows = f"{place}.experts.{name}", f"{hf_prefix}.experts.gate_up_proj", (first, hidden)
        names.append(HFName(f"{module}.weight", both, "transpose", rows, every=2, dim=1))
        names.append(HFName(f"{module}.bias", f"{both}_bias", "same", rows, every=2, dim=1))
    names.append(HFName(f"{place}.experts.w_down.weight", f"{hf_prefix}.experts.down_proj", "transpose"))
    names.append(HFName(f"{place}.experts.w_down.bias", f"{hf_prefix}.experts.down_proj_bias"))
    return (*names, *([HFName(f"{place}.router.share", "")] if options.router.global_aux_loss else []))
