"""Reader that converts the expert fields of a config.json to options. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from gangline import UserError
from gangline.config import NonNegativeInt, PositiveInt
from gangline.config.fields import resolve_hints_with_ranges
from gangline_models.hugging_face.config_reader import ConfigReader
from gangline_moe.interop.architectures import ARCHITECTURES, DOTS, QWEN, ExpertsArchitecture
from gangline_moe.routers.config import Grouped, RouterConfig, Sigmoid

if TYPE_CHECKING:
    from gangline_moe.config import MoeOptions

Options = TypeVar("Options", bound="MoeOptions")
# Expert fields, removed before the part of the model without experts reads the config.json. Losses and noise matter
# only in training.
ROUTING = (
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
    *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"),
    *("router_aux_loss_coef", "router_jitter_noise", "output_router_logits"),
)
DOTS_ALONE = (*DOTS.only, "aux_loss_alpha", "seq_aux", "ep_size")


def read_experts(cls: type[Options], config: dict[str, Any]) -> tuple[Options, dict[str, Any]] | None:
    """Return (the `moe` options of `config`, the config.json of the model without experts).

    Returns None if the model has no experts. Raises UserError for attention windows, and for blocks with experts that
    `first` and `every` cannot describe.
    """
    name = (config.get("architectures") or [None])[0]
    known_architecture = next((architecture for architecture in ARCHITECTURES if architecture.name == name), None)
    return None if known_architecture is None else _Experts(known_architecture, config).read(cls)


class _Experts:
    """Reader of the expert fields of one config.json."""

    def __init__(self, of: ExpertsArchitecture, config: dict[str, Any]) -> None:
        self.of, self.config, self.reader = of, config, ConfigReader("", config, "config.json describes a model")
        self.layers = self.read_field("num_hidden_layers", PositiveInt) if "num_hidden_layers" in of.silent else 0

    def read(self, cls: type[Options]) -> tuple[Options, dict[str, Any]] | None:
        of, first, every = self.of, 0, 1
        if of.model_type:
            self._refuse_windows()
            self.read_field("num_experts_per_tok", PositiveInt)  # read here to report its error first
        if "first_k_dense_replace" in of.silent:
            first = self.read_field("first_k_dense_replace", NonNegativeInt)
            if not of.model_type and first >= self.layers:
                return None
        number_field = next((name for name in of.read_as if self.reader.holds(name)), of.number)
        experts = self.read_field(number_field, NonNegativeInt if of.number in of.rest else PositiveInt, of.number)
        if not experts:
            return None
        if "decoder_sparse_step" in of.silent:
            if not (blocks := self._list_sparse_blocks()) and of.number in of.rest:
                return None
            first, every = self._find_first_and_every(blocks)
        for name, values in of.only.items():
            if (value := self.config.get(name, values[0])) not in (*values, None):
                what = f"config.json describes a {of.title} model with {name}={value}."
                raise UserError(what, f"gangline supports only {name}={' or '.join(map(str, values))}.")
        hidden = self.read_field(of.width, PositiveInt)
        top_k, router = self.read_field("num_experts_per_tok", PositiveInt), self._read_router(experts)
        sizes = {"experts": experts, "top_k": top_k, "ffn_dim": hidden, "first": first, "every": every}
        return cls(**sizes, router=router, **self._read_shared(hidden)), self._make_dense_config()

    def read_field(self, name: str, hint: Any, of: str = "") -> Any:
        """Return field `name`; if the file lacks it, its default in `silent`, which has the key `of` if given.

        Raises UserError for null, and for a missing required field.
        """
        absent = self.of.silent[of or name]
        if absent is None and not self.reader.holds(name):
            what = f"config.json of a model with experts does not give {name}."
            raise UserError(what, "transformers has no default for this field.")
        if name in self.of.nullable and self.config.get(name) is None:
            return absent
        return self.reader.read_given(name, absent, hint)

    def _refuse_windows(self) -> None:
        if (window := self.config.get("sliding_window")) is not None:
            what = f"config.json describes a model with experts and sliding_window={window}."
            raise UserError(what, "gangline supports attention windows only in models without experts.")
        silent = self.of is DOTS and "sliding_window" not in self.config
        if silent and self.layers > self.reader.read_given("max_window_layers", 62, NonNegativeInt):
            why = "transformers then uses 4096, and gangline supports attention windows only in models without experts."
            raise UserError("config.json of a dots.llm1 model does not give sliding_window.", why)

    def _read_router(self, experts: int) -> RouterConfig:
        """Return the options of the router. Raises UserError for groups that do not divide the experts."""
        if not self.of.scored:
            told = "norm_topk_prob" in self.of.silent
            return self.of.router[0](**({"renormalise": self.read_field("norm_topk_prob", bool)} if told else {}))
        scale = self.read_field("routed_scaling_factor", resolve_hints_with_ranges(Sigmoid)["scale"])
        scores = {"renormalise": self.read_field("norm_topk_prob", bool), "scale": scale}
        groups, top = self.read_field("n_group", PositiveInt), self.read_field("topk_group", PositiveInt)
        if groups == 1:
            return Sigmoid(**scores)
        if experts % groups or experts // groups < 2:
            why = f"n_group must divide the {experts} experts into groups of at least 2."
            raise UserError(f"config.json describes a model with n_group={groups}.", why)
        if top > groups:
            raise UserError(
                f"config.json describes a model with topk_group={top}.", f"topk_group must be at most n_group={groups}."
            )
        return Grouped(**scores, groups=groups, top_groups=top)

    def _read_shared(self, hidden: int) -> dict[str, Any]:
        if self.of.scored:
            return {"shared": self.read_field("n_shared_experts", NonNegativeInt)}
        if not self.of.gated:
            return {}
        width = self.read_field("shared_expert_intermediate_size", NonNegativeInt)
        if width % hidden or not width:
            what = f"config.json describes a {self.of.title} model with shared_expert_intermediate_size={width}."
            raise UserError(what, f"The width must be a positive multiple of {self.of.width}={hidden}.")
        return {"shared": width // hidden, "shared_gate": True}

    def _find_first_and_every(self, sparse: list[int]) -> tuple[int, int]:
        """Return `first` and `every` of the blocks with experts. Raises UserError if they are not evenly spaced."""
        layers = range(self.layers)
        for first in sparse[:1]:
            every = sparse[1] - first if len(sparse) > 1 else len(layers)
            if sparse == list(layers)[first::every]:
                return first, 1 if len(sparse) == 1 and first == len(layers) - 1 else every
        fields = {"num_hidden_layers": self.layers}
        fields |= {name: self.config.get(name) for name in ("decoder_sparse_step", "mlp_only_layers")}
        text = ", ".join(f"{name}={value}" for name, value in fields.items())
        why = f"moe.first and moe.every cannot describe these blocks: {text}."
        raise UserError("config.json describes a model whose blocks with experts are not evenly spaced.", why)

    def _list_sparse_blocks(self) -> list[int]:
        step = self.read_field("decoder_sparse_step", PositiveInt)
        dense = set(self.reader.take("mlp_only_layers", hint=list[int]) or ())
        return [block for block in range(self.layers) if (block + 1) % step == 0 and block not in dense]

    def _make_dense_config(self) -> dict[str, Any]:
        """Return the config.json of the model without experts."""
        of, alone = self.of, DOTS_ALONE if self.of is DOTS else ()
        rest = {name: value for name, value in self.config.items() if name not in ROUTING and name not in alone}
        if not of.model_type:
            return rest | (dict(of.rest) or {"first_k_dense_replace": self.layers})
        head = {}
        if of.dense == QWEN and rest.get("head_dim") is None:
            sizes = ("hidden_size", "num_attention_heads")
            if None not in map(rest.get, sizes):
                width, heads = (self.reader.read_given(name, None, PositiveInt) for name in sizes)
                head["head_dim"] = width // heads  # the default of Qwen3 is 128
        return {**of.rest, **rest, **head, "architectures": [of.dense]}
