"""Convert a published row to an explained layout, or report the reason why the row cannot be judged."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from gangline import UserError
from gangline.config import Recompute
from gangline.config.defaults import build_default_run
from gangline.explain.explained import Explained
from gangline.mesh import Mesh
from gangline.plugin.registry import installed
from gangline_basics.cluster.file import Cluster, load_cluster
from gangline_basics.model.config import DecoderConfig
from gangline_planner.price.step import compute_step_time
from published.model import experts_of, model_of, modules_of
from published.recipes import Recipe
from published.row import Row, Unjudged
from published.software import as_its_software
from published.work import with_second_head, without_end_blocks

CLUSTERS = [  # (pattern of the field `gpu`, name of the cluster file)
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
MATMUL_FORMATS = [  # (pattern of the field `precision`, number format of matmuls)
    (r"fp4", "fp4"),
    (r"fp8|float8|e4m3|mx8", "fp8"),
    (r"fp16|(?<!b)float16|half", "fp16"),
    (r"fp32|tf32|float32", "fp32"),
]
# (pattern of a source that publishes no sequence lengths, fields of its runs)
DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    (r"torchtitan", {"seq": 8192}),  # default of torchtitan's Llama 3 configurations
    # these values reproduce the published TFLOP/s (arXiv 2104.04473, equation 3)
    (r"tables\.tex", {"seq": 1024, "recompute": "full"}),
]


@dataclass(frozen=True)
class Case:
    """A row's layout, its machine, and its published values."""

    row: Row
    explained: Explained
    cluster: Cluster
    assumed: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Return the published step time in seconds.

        A throughput is converted with the row's own number of tokens or FLOPs per step.
        """
        found = self.explained
        if time := self.row.number("step_time_s"):
            return time
        if rate := self.row.number("tokens_per_s_per_gpu"):
            return found.tokens / rate / found.mesh.world
        rate = self.row.number("tflops_per_gpu")
        assert rate is not None
        return found.token_flops * found.tokens / (rate * 1e12 * found.mesh.world)

    @property
    def memory(self) -> float | None:
        """Return the published memory of the rank with most memory, in bytes."""
        if gib := self.row.number("memory_gib"):
            return gib * 2**30
        gb = self.row.number("peak_memory_gb")
        return None if gb is None else gb * 1e9


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each axis; number of sequences in a step and in a microbatch."""

    tp: int
    pp: int
    cp: int
    data: int
    batch: int
    micro: int


def case_of(row: Row) -> Case:
    """Return a row with its layout. Raises Unjudged if the row lacks a value, or a value is not supported."""
    if not any(row.number(name) for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")):
        raise Unjudged("no step time, tokens/s or TFLOP/s are published")
    row.check_counts()
    name = next((name for pattern, name in CLUSTERS if row.matches("gpu", pattern)), None)
    if name is None:
        raise Unjudged(f"no cluster file for {row.get('gpu') or 'an unnamed accelerator'}")
    try:
        cluster = load_cluster(name)
        if any(row.number(name) for name in ("micro_batch", "local_batch", "grad_acc")):
            return _case(row, cluster)
        return _fastest(row, cluster)
    except UserError as error:
        raise Unjudged(error.what) from error
    except ValueError as error:
        raise Unjudged(f"its layout does not divide: {error}") from error


def _fastest(row: Row, cluster: Cluster) -> Case:
    """Return the case with the fastest microbatch size, for a row without one: its authors have tuned it."""
    found = _case(row, cluster)
    best = compute_step_time(found.explained, cluster).seconds
    for micro in (2, 4, 8, 16):
        try:
            other = _case(Row({**row.fields, "micro_batch": micro}), cluster)
        except (Unjudged, ValueError):
            break
        seconds = compute_step_time(other.explained, cluster).seconds
        if other.explained.ranks[other.explained.fullest].memory > cluster["memory.bytes"]:
            break
        if seconds < best:
            best, found = seconds, replace(other, row=row, assumed=(f"micro_batch {micro}", *other.assumed))
    return found


def _case(row: Row, cluster: Cluster) -> Case:
    assumed: list[str] = []
    sizes = _sizes(row, assumed)
    published, row = row, _with_defaults(row, assumed)
    recipe, shapes, matmul_format = Recipe.of(row), model_of(row), _find_matmul_format(row)
    model = DecoderConfig(**shapes.model)
    chunks = _chunks(row, recipe, sizes.pp, model.layers, assumed)
    stages = chunks * sizes.pp
    ends = stages - model.layers  # Megatron-LM can count the embedding and the head as one block each
    if 0 < ends <= 2:
        assumed.append(f"{stages} blocks for {model.layers}")
        model = replace(model, layers=stages)
    if recipe.mtp:
        model = replace(model, layers=model.layers + 1)
    run = build_default_run(
        model=model,
        parallel=_parallel(row, sizes, chunks, _stages(row, recipe, model.layers, stages), cluster),
        precision=matmul_format if matmul_format in ("fp16", "fp32") else "bf16",
        batch={
            "global_size": sizes.batch,
            "micro_size": sizes.micro,
            "sequence_length": int(row.number("seq") or 0),
        },
        run=_recompute(row),
        **({"moe": experts_of(shapes.moe, row)} if shapes.moe else {}),
    )
    tree, plan = modules_of(run, shapes)
    if "lora" in row.text("table", "technique", "model"):
        plan = replace(plan, frozen=("embed", plan.blocks, "head"))
    mesh = Mesh.of({"pp": sizes.pp, "dp_shard": sizes.data, "cp": sizes.cp, "tp": sizes.tp})
    found = run.parallel.explain(run, mesh, (tree, plan), cluster.topology)
    if found is None:
        raise Unjudged("its strategy does not support `gangline parallel explain`")
    if ends == 2:
        found = without_end_blocks(found)
    for _ in range(shapes.hybrid.further if shapes.hybrid else int(recipe.mtp)):
        found = replace(found, work=(*found.work[:-1], with_second_head(found.work[-1])))
    # experts alone are in 4 bits: mixers and latent projections use 8 and 16 bits
    if shapes.hybrid and matmul_format == "fp4":
        matmul_format = "fp8"
    found = as_its_software(row, recipe, replace(found, matmul_format=matmul_format), shapes.moe.get("top_k", 0))
    return Case(published, found, cluster, tuple(assumed))


def _sizes(row: Row, assumed: list[str]) -> Sizes:
    tp, pp, cp = (row.whole(axis, 1) for axis in ("tp", "pp", "cp"))
    world = _world(row, tp * pp * cp, assumed)
    if world % (tp * pp * cp):
        raise Unjudged(f"tp {tp} x pp {pp} x cp {cp} does not divide {world}")
    data = world // (tp * pp * cp)
    if world > 1 and not any(row.number(name) for name in ("tp", "pp", "cp", "dp", "fsdp")):
        raise Unjudged("its layout is not published")
    local = row.number("local_batch")  # sequences per data rank; a pipeline splits them into microbatches of one
    micro = row.whole("micro_batch", int(local or 1) if pp == 1 else 1)
    passes, batch = row.number("grad_acc"), row.number("global_batch")
    if local is None and not row.number("micro_batch"):
        if passes and batch and batch % (data * passes) == 0:
            micro = int(batch / (data * passes))
        else:
            assumed.append("micro_batch 1")
    batch = batch or data * (local or micro * (passes or 1))
    if batch % (data * micro):
        raise Unjudged(f"a batch of {batch:g} does not divide over {data} data ranks in microbatches of {micro}")
    return Sizes(tp, pp, cp, data, int(batch), micro)


def _world(row: Row, model: int, assumed: list[str]) -> int:
    """Return the number of accelerators: as published, or that of a published layout.

    model: number of ranks that share one copy of the model

    If a row has both numbers and its batch size does not divide over the first, the layout is used, because published
    step times and throughputs per accelerator are those of the layout.
    """
    said, data, batch = row.number("n_gpus"), row.number("dp"), row.number("global_batch")
    if said is None and (nodes := row.number("nodes")):
        said = nodes * (row.number("gpus_per_node") or 8)
    if data is None or (said is not None and (batch is None or not batch % (said / model))):
        return row.whole("n_gpus") if said is None else int(said)
    own = int(model * data)
    if said is not None and (batch is None or batch % data or own == said):
        return int(said)
    if own != said:
        assumed.append(f"{own} accelerators")
    return own


def _with_defaults(row: Row, assumed: list[str]) -> Row:
    """Return a row with a sequence length. Raises Unjudged if neither the row nor its source has one."""
    if row.number("seq") is not None:
        return row
    for pattern, fields in DEFAULTS:
        if row.matches("source", pattern):
            assumed += [f"{name} {value}" for name, value in fields.items()]
            return Row({**row.fields, **fields})
    raise Unjudged("its sequence length is not published")


def _parallel(row: Row, sizes: Sizes, chunks: int, stages: list[int] | None, cluster: Cluster) -> Any:
    """Return the options of the strategy `3d`. Raises Unjudged if the strategy is not installed."""
    offers = installed().get_offers("parallel")
    if "3d" not in offers:
        raise Unjudged("gangline-parallel-megatron-style is not installed")
    interleaved = sizes.pp > 1 and chunks > 1
    return offers["3d"].part.config(
        tp=sizes.tp,
        pp=sizes.pp,
        cp=sizes.cp,
        dp_replicate=1,
        dp_shard=sizes.data,
        zero=_zero(row, sizes.pp),
        stages=stages,
        schedule="interleaved_1f1b" if interleaved else "1f1b",
        chunks=chunks if interleaved else None,
        sequence_parallel=bool(row.get("seq_parallel", sizes.tp > 1)),
        topology=cluster.topology,
        force=True,
    )


def _stages(row: Row, recipe: Recipe, layers: int, stages: int) -> list[int] | None:
    """Return the number of blocks of each stage; None: balanced by compute.

    Megatron-LM gives all stages the same number, or the first and last stage one less; other software balances compute.
    """
    if stages == 1 or row.matches("source", "nanotron"):
        return None
    if recipe.full_first and stages <= 16:
        most = -(-layers // stages)
        last = layers - most * (stages - 1)
        if last > 0:
            return [most] * (stages - 1) + [last]
    if layers % stages == 0:
        return [layers // stages] * stages
    if (layers + 2) % stages == 0 and layers + 2 > stages:
        inner = (layers + 2) // stages
        return [inner - 1, *[inner] * (stages - 2), inner - 1]
    return None


def _chunks(row: Row, recipe: Recipe, pp: int, layers: int, assumed: list[str]) -> int:
    """Return the number of model chunks per pipeline rank.

    If only the notes of a row mention interleaving, a chunk is one block; if the schedule does, there are two chunks.
    """
    if pp == 1:
        return 1
    chunks = recipe.chunks if row.number("vp") is None else None
    if "vp" not in row.fields and row.matches("notes", "interleav"):
        chunks = -(-layers // pp)
    elif "vp" not in row.fields and row.matches("schedule", "interleav"):
        chunks = 2
    if chunks is None:
        return row.whole("vp", 1)
    assumed.append(f"{chunks} chunks")
    return chunks


def _zero(row: Row, pp: int) -> int:
    """Return the ZeRO stage; a pipeline replicates weights and gradients."""
    if row.get("fsdp"):
        return 3 if pp == 1 else 1
    said = row.get("zero")
    return min(said, 2 if pp == 1 else 1) if isinstance(said, int) else 1


def _recompute(row: Row) -> dict[str, Any]:
    """Return the run's options of activation recomputation.

    In torchtitan, "selective" means every second block, or every second matmul of each block
    (torchtitan/models/llama3/infra/parallelize.py). In Megatron-LM it means attention alone.
    """
    selective = row.matches("recompute", "selective")
    if selective and row.matches("source", "torchtitan"):
        return {"recompute": Recompute.full, "recompute_every": 2}
    if row.matches("recompute", "full"):
        return {"recompute": Recompute.full}
    return {"recompute": Recompute.selective if selective else Recompute.none}


def _find_matmul_format(row: Row) -> str:
    said = row.text("precision") or ("fp16" if row.matches("gpu", "v100") else "bf16")
    return next((name for pattern, name in MATMUL_FORMATS if re.search(pattern, said)), "bf16")
