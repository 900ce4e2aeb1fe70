"""From a published row to a layout that explains itself, or the reason why it cannot be judged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gangline import UserError
from gangline.cluster.file import Cluster, load_cluster
from gangline.config import Recompute, Run
from gangline.config.defaults import default_run
from gangline.explain.explained import Explained
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.model.config import DecoderConfig
from gangline.model.decoder_nodes import AttentionNode, FeedForwardNode
from gangline.model.tree import Node, by_path, replaced
from gangline.plan import Cut, Plan
from gangline_planner.judge import recipes
from gangline_planner.judge.hybrids import as_hybrid
from gangline_planner.judge.nodes import GeluNode, LatentAttentionNode
from gangline_planner.judge.shapes import shapes_of
from gangline_planner.judge.software import as_its_software, without_end_blocks
from gangline_planner.price.step import step_time

Row = Mapping[str, Any]


MOST = 1e100  # of any number that somebody measured
COUNTED = (
    *("tp", "pp", "cp", "dp", "ep", "vp", "n_gpus", "nodes", "gpus_per_node"),
    *("seq", "micro_batch", "local_batch", "grad_acc"),
)
MOST_COUNTED = 10**7


class Unjudged(Exception):
    """Why a row is not judged."""


@dataclass(frozen=True)
class Judgeable:
    """A row's layout, the machine that it ran on, and what it published."""

    row: Row
    explained: Explained
    cluster: Cluster
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """The published step time; of what a row counts as tokens or operations of a step, by its own convention."""
        found = self.explained
        if time := number(self.row, "step_time_s"):
            return time
        if rate := number(self.row, "tokens_per_s_per_gpu"):
            return found.tokens / rate / found.mesh.world
        rate = number(self.row, "tflops_per_gpu")
        assert rate is not None
        return found.token_flops * found.tokens / (rate * 1e12 * found.mesh.world)

    @property
    def memory(self) -> float | None:
        """Published bytes of the fullest rank."""
        if gib := number(self.row, "memory_gib"):
            return gib * 2**30
        gb = number(self.row, "peak_memory_gb")
        return None if gb is None else gb * 1e9


CLUSTERS = [  # what a row's `gpu` says, in small letters -> the cluster file
    (r"500w", "h100_500w_ib"),
    (r"h100|h800", "h100_ib"),
    (r"a[18]00.*800 gb", "a100_800g"),
    (r"a[18]00", "a100_ib"),
    (r"gb300", "gb300_nvl72"),
    (r"gb200", "gb200_nvl72"),
    (r"b300", "b300_ib"),
    (r"b200", "b200_ib"),
    (r"h200", "h200_ib"),
    (r"mi300x", "mi300x_roce"),
    (r"v5p", "v5p"),
    (r"v100", "v100_ib"),
]


def judgeable(row: Row, clusters: Mapping[str, Cluster] | None = None) -> Judgeable:
    """Raises Unjudged. clusters: files to take instead of the shipped ones, by name."""
    if not any(number(row, name) for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")):
        raise Unjudged("no step time, tokens a second or TFLOP/s are published")
    _check_counts(row)
    gpu = str(row.get("gpu") or "").lower()
    name = next((name for pattern, name in CLUSTERS if re.search(pattern, gpu)), None)
    if name is None:
        raise Unjudged(f"no cluster file for {row.get('gpu') or 'an accelerator that is not named'}")
    try:
        cluster = (clusters or {}).get(name) or load_cluster(name)
        if number(row, "micro_batch") or number(row, "local_batch") or number(row, "grad_acc"):
            return _judgeable(row, cluster)
        return _fastest(row, cluster)
    except UserError as error:
        raise Unjudged(error.what) from error
    except ValueError as error:
        raise Unjudged(f"its layout does not divide: {error}") from error


def _check_counts(row: Row) -> None:
    """Raises Unjudged where something of a layout is there and is no number of its kind: it is not taken to be 1."""
    for name in COUNTED:
        value, found = row.get(name), number(row, name)
        absent = value is None or value == ""
        if not absent and (found is None or found % 1 or not found <= MOST_COUNTED):
            raise Unjudged(f"{name} is {value!r}, no whole number from 1 to {MOST_COUNTED:,}")
    batch = row.get("global_batch")  # of a ramp it is words
    if isinstance(batch, int | float) and not 1 <= batch <= MOST_COUNTED:
        raise Unjudged(f"global_batch is {batch!r}, no number from 1 to {MOST_COUNTED:,}")


def _fastest(row: Row, cluster: Cluster) -> Judgeable:
    """A row that does not say its microbatches, with those that make its layout fastest: who publishes has tried."""
    found = _judgeable(row, cluster)
    best = step_time(found.explained, cluster).seconds
    for micro in (2, 4, 8, 16):
        try:
            other = _judgeable({**row, "micro_batch": micro}, cluster)
        except (Unjudged, ValueError):
            break
        seconds = step_time(other.explained, cluster).seconds
        if other.explained.ranks[other.explained.fullest].memory > cluster["memory.bytes"]:
            break
        if seconds < best:
            best, found = seconds, replace(other, row=row, assumed=(f"micro_batch {micro}", *other.assumed))
    return found


def _judgeable(row: Row, cluster: Cluster) -> Judgeable:
    assumed: list[str] = []
    tp, pp, cp = (whole(row, axis, 1) for axis in ("tp", "pp", "cp"))
    world = _world(row, tp * pp * cp, assumed)
    if world % (tp * pp * cp):
        raise Unjudged(f"tp {tp} x pp {pp} x cp {cp} does not divide {world}")
    data = world // (tp * pp * cp)
    if world > 1 and not any(number(row, name) for name in ("tp", "pp", "cp", "dp", "fsdp")):
        raise Unjudged("its layout is not published")
    local = number(row, "local_batch")  # sequences of a data rank, which a pipeline takes one by one
    micro = whole(row, "micro_batch", int(local or 1) if pp == 1 else 1)
    passes, whole_batch = number(row, "grad_acc"), number(row, "global_batch")
    if local is None and not number(row, "micro_batch"):
        if passes and whole_batch and whole_batch % (data * passes) == 0:
            micro = int(whole_batch / (data * passes))
        else:
            assumed.append("micro_batch 1")
    batch = number(row, "global_batch") or data * (local or micro * (number(row, "grad_acc") or 1))
    if batch % (data * micro):
        raise Unjudged(f"a batch of {batch:g} does not divide over {data} data ranks in microbatches of {micro}")
    sequence = number(row, "seq")
    if sequence is None and "torchtitan" in str(row.get("source")):
        sequence = 8192.0  # the default of its configurations of Llama 3
        assumed.append("seq 8192")
    if sequence is None and "tables.tex" in str(row.get("source")):
        sequence, row = 1024.0, {**row, "recompute": "full"}  # with these its TFLOP/s come out (arXiv 2104.04473, 3)
        assumed += ["seq 1024", "recompute full"]
    if sequence is None:
        raise Unjudged("its sequence length is not published")
    model, moe, latent, gelu = _model(row)
    chunks = _chunks(row, pp, model.layers, assumed)
    ends = chunks * pp - model.layers  # Megatron lets embedding and head count as a block each
    if 0 < ends <= 2:
        assumed.append(f"{chunks * pp} blocks for {model.layers}")
        model = replace(model, layers=chunks * pp)
    further = recipes.predicts_further(row)
    if further:
        model = replace(model, layers=model.layers + 1)
    run = default_run(
        model=model,
        parallel=_parallel(row, tp, pp, cp, data, chunks, model.layers, cluster),
        precision={"fp16": "fp16", "fp32": "fp32"}.get(_products(row), "bf16"),
        batch={"global_size": int(batch), "micro_size": micro, "sequence_length": int(sequence)},
        run=_recompute(row),
        **({"moe": _experts(moe, row)} if moe else {}),
    )
    tree, plan = _modules(run, latent, gelu)
    hybrid = known.hybrid if (known := shapes_of(str(row.get("model") or ""))) else None
    if hybrid is not None:
        tree, plan = as_hybrid(tree, plan, hybrid)
    if any("lora" in str(row.get(name)).lower() for name in ("table", "technique", "model")):
        plan = replace(plan, frozen=("embed", plan.blocks, "head"))
    mesh = Mesh.of({"pp": pp, "dp_shard": data, "cp": cp, "tp": tp})
    found = run.parallel.explain(run, mesh, (tree, plan), cluster.topology)
    if found is None:
        raise Unjudged("its strategy does not explain itself")
    if ends == 2:
        found = without_end_blocks(found)
    for _ in range(hybrid.further if hybrid else int(further)):
        found = replace(found, work=(*found.work[:-1], recipes.with_second_head(found.work[-1])))
    products = _products(row)
    if (
        hybrid is not None and products == "fp4"
    ):  # its experts alone, and not all: mixers and latents take 8 bits and 16
        products = "fp8"
    found = as_its_software(row, replace(found, products=products), int(moe.get("top_k", 0)))
    return Judgeable(row, found, cluster, tuple(assumed))


def _world(row: Row, model: int, assumed: list[str]) -> int:
    """Number of accelerators: as published, or what a layout that is published whole has, of which `model` ranks share
    a copy of the model. Where both are and no batch divides over the first, the layout is taken at its word: seconds
    and rates of an accelerator are those of it.
    """
    said, data, batch = number(row, "n_gpus"), number(row, "dp"), number(row, "global_batch")
    if said is None and (nodes := number(row, "nodes")):
        said = nodes * (number(row, "gpus_per_node") or 8)
    if data is None or (said is not None and (batch is None or not batch % (said / model))):
        return whole(row, "n_gpus") if said is None else int(said)
    own = int(model * data)
    if said is not None and (batch is None or batch % data or own == said):
        return int(said)
    if own != said:
        assumed.append(f"{own} accelerators")
    return own


def _parallel(row: Row, tp: int, pp: int, cp: int, data: int, chunks: int, layers: int, cluster: Cluster) -> Any:
    """Options of the strategy `3d`. Raises Unjudged where it is not installed."""
    from gangline.plugin.registry import installed

    offers = installed().offers("parallel")
    if "3d" not in offers:
        raise Unjudged("it takes gangline-parallel-megatron-style")
    zero = (3 if pp == 1 else 1) if row.get("fsdp") else _zero(row)  # in a pipeline weights and gradients stay
    return offers["3d"].part.config(
        tp=tp,
        pp=pp,
        cp=cp,
        dp_replicate=1,
        dp_shard=data,
        zero=zero,
        stages=_stages(row, layers, chunks * pp),
        schedule="interleaved_1f1b" if pp > 1 and chunks > 1 else "1f1b",
        chunks=chunks if pp > 1 and chunks > 1 else None,
        sequence_parallel=bool(row.get("seq_parallel", tp > 1)),
        topology=cluster.topology,
        force=True,
    )


def _stages(row: Row, layers: int, stages: int) -> list[int] | None:
    """Megatron-LM gives all stages as many blocks, or the ends one less; others balance what they compute (None)."""
    if stages == 1 or "nanotron" in str(row.get("source")):
        return None
    if recipes.fills_stages_in_turn(row) and stages <= 16:
        each = -(-layers // stages)
        return [each] * (stages - 1) + [layers - each * (stages - 1)]
    if layers % stages == 0:
        return [layers // stages] * stages
    if (layers + 2) % stages == 0 and layers + 2 > stages:
        each = (layers + 2) // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    return None


def _chunks(row: Row, pp: int, layers: int, assumed: list[str]) -> int:
    """Model chunks of a pipeline rank. Where a row says that stages interleave and not how many, one block each."""
    if pp == 1:
        return 1
    if "vp" not in row and "interleav" in str(row.get("notes", "")).lower():
        chunks = -(-layers // pp)
        assumed.append(f"{chunks} chunks")
        return chunks
    if "vp" not in row and "interleav" in str(row.get("schedule", "")).lower():
        assumed.append("2 chunks")
        return 2
    known = recipes.chunks(row)
    if known is not None and number(row, "vp") is None:
        assumed.append(f"{known} chunks")
        return known
    return whole(row, "vp", 1)


def _zero(row: Row) -> int:
    said = row.get("zero")
    return min(said, 1 if whole(row, "pp", 1) > 1 else 2) if isinstance(said, int) else 1


def _recompute(row: Row) -> dict[str, Any]:
    """Options of a run. What torchtitan calls selective is every second block, or of every block every second product
    (torchtitan/models/llama3/infra/parallelize.py); what Megatron-LM calls so is attention alone.
    """
    said = str(row.get("recompute") or "none").lower()
    if "selective" in said and "torchtitan" in str(row.get("source")):
        return {"recompute": Recompute.full, "recompute_every": 2}
    if "full" in said:
        return {"recompute": Recompute.full}
    return {"recompute": Recompute.selective if "selective" in said else Recompute.none}


def _products(row: Row) -> str:
    said = str(row.get("precision") or ("fp16" if "V100" in str(row.get("gpu")) else "bf16")).lower()
    formats = {"fp4": "fp4", "fp8|float8|e4m3|mx8": "fp8", "fp16|float16|half": "fp16", "fp32|tf32|float32": "fp32"}
    for pattern, name in formats.items():
        if re.search(pattern, said.replace("bfloat16", "bf16")):
            return name
    return "bf16"


def _model(row: Row) -> tuple[DecoderConfig, dict[str, Any], bool, bool]:
    """(the decoder, options of its experts, whether its attention is latent, whether its feed-forward is GPT's)."""
    known = shapes_of(str(row.get("model") or ""))
    if known is not None:
        sizes = dict(known.model)
        experts = dict(known.moe)
        if row.get("layers"):
            sizes["layers"] = whole(row, "layers")
            if sizes["layers"] < known.model["layers"] and experts.get("first"):
                experts["first"] = 1  # as SimuMax cuts it (docs/b200/b200_release_v1.2_summary.md: dense_layers=1)
        return DecoderConfig(**sizes), experts, known.latent, known.gelu
    missing = [name for name in ("hidden", "layers", "heads") if not row.get(name)]
    if missing:
        raise Unjudged(f"shapes of {row.get('model') or 'a model without a name'} are not known")
    if row.get("experts"):
        raise Unjudged("its experts are not described as a whole")
    dim = whole(row, "hidden")
    gelu = not row.get("ffn")
    config = DecoderConfig(
        dim=dim,
        layers=whole(row, "layers"),
        heads=whole(row, "heads"),
        kv_heads=whole(row, "kv_heads", whole(row, "heads")),
        hidden=4 * dim if gelu else whole(row, "ffn"),
        vocab_size=whole(row, "vocab", 51_200),
        tied=bool(row.get("tied", gelu)),
    )
    return config, {}, False, gelu


def _experts(options: Mapping[str, Any], row: Row) -> Any:
    from gangline.plugin.registry import installed

    offers = installed().offers("moe")
    if "on" not in offers:
        raise Unjudged("it takes gangline-moe")
    config = offers["on"].part.config
    names = {item.name for item in fields(config)}
    ep = whole(row, "ep", 1)
    given = {**options, "ep": ep, "ep_out_of": ["dp_shard", "cp", "tp"]}  # no expert is cut by tp
    return config(**{name: value for name, value in given.items() if name in names})


def _modules(run: Run, latent: bool, gelu: bool) -> tuple[Node, Plan]:
    tree, plan = compose_model(run)
    if latent:  # tp cuts heads; what keys and values come from is whole
        at = f"{plan.blocks}.*.attention"
        cuts = (Cut.colwise(f"{at}.wq_b"), Cut.colwise(f"{at}.wkv_b"), Cut.rowwise(f"{at}.wo"))
        plan = plan.extended(cuts=cuts)
    nodes = by_path(tree)
    made: dict[Node, Node] = {}
    for index in range(plan.layers):
        path = f"{plan.blocks}.{index}"
        block = nodes[path]
        if block not in made:
            made[block] = _block(block, latent, gelu)
        if made[block] is not block:
            tree = replaced(tree, path, made[block])
    return tree, plan


def _block(block: Node, latent: bool, gelu: bool) -> Node:
    attention, feed_forward = (getattr(block, name, None) for name in ("attention", "feed_forward"))
    if latent and isinstance(attention, AttentionNode):
        node = LatentAttentionNode(
            dim=attention.dim, heads=attention.heads, query_rank=1536, kv_rank=512, nope=128, rope=64, value=128
        )
        block = replaced(block, "attention", node)
    if gelu and isinstance(feed_forward, FeedForwardNode):
        block = replaced(block, "feed_forward", GeluNode(dim=feed_forward.dim, hidden=feed_forward.hidden))
    return block


def number(row: Row, name: str) -> float | None:
    """A positive number, or None for what is none; words that are a number count as that."""
    value = row.get(name)
    if isinstance(value, str) and re.fullmatch(r"\s*\d[\d,]*(\.\d+)?\s*", value):
        value = float(value.replace(",", ""))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MOST else None


def whole(row: Row, name: str, default: int | None = None) -> int:
    """A positive whole number. Raises Unjudged where the row has none, and no default is known."""
    value = number(row, name)
    if value is None:
        if default is None:
            raise Unjudged(f"{name} is not published as a number")
        return default
    return int(value)
