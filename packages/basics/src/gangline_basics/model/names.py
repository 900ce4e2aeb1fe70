"""Hugging Face names of a decoder's modules, as rules of a plan. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gangline.plan import HFName

# Path of a module -> its name in most architectures; in a block the name follows "model.layers.{0}.".
TOP = {"embed": "model.embed_tokens", "head.norm": "model.norm", "head": "lm_head"}
LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.sinks.weight": "self_attn.sinks",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.w_gate": "mlp.gate_proj",
    "feed_forward.w_up": "mlp.up_proj",
    "feed_forward.w_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class ModuleNames:
    """Names of modules in the files of an architecture.

    layer       module of a block -> its name. A parameter has its own entry if the last component of its Hugging Face
                name differs from gangline's. A parameter without an entry gets no name, because the architecture
                does not have it.
    top         module outside of blocks -> its name
    layers      prefix of the names of a layer; {0} is its number
    transposed  modules of a layer whose matrix is transposed in the files
    rows        module of a layer -> (first, of): its rows in a matrix that several modules share (`HFName.rows`)
    unread      rules for tensors that files may hold and the model does not have (`HFName.unread`)
    """

    layer: Mapping[str, str] = field(default_factory=LAYER.copy)
    top: Mapping[str, str] = field(default_factory=TOP.copy)
    layers: str = "model.layers.{0}."
    transposed: frozenset[str] = frozenset()
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unread: tuple[HFName, ...] = ()

    def list_rules(self, parameters: Iterable[str]) -> tuple[HFName, ...]:
        """Return a rule for each parameter of the first block and outside of blocks, because all blocks are alike."""
        rules = dict[str, HFName]()
        for parameter in parameters:
            path, _, leaf = parameter.rpartition(".")
            if not path.startswith("blocks."):
                rules[parameter] = HFName(parameter, f"{self.top[path]}.{leaf}")
                continue
            module = path.split(".", 2)[2]
            pattern = f"blocks.*.{module}.{leaf}"
            called = self.layer.get(f"{module}.{leaf}") or (self.layer.get(module) and f"{self.layer[module]}.{leaf}")
            if called is None:
                continue
            turned = module in self.transposed and leaf == "weight"
            rows = self.rows.get(module)
            rules[pattern] = HFName(pattern, f"{self.layers}{called}", "transpose" if turned else "same", rows)
        return (*rules.values(), *self.unread)
