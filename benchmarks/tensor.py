"""Compare tensor parallelism with torch's `parallelize_module` (DTensor, loss parallel), in alternating steps.

    python benchmarks/tensor.py --processes 2 --steps 30

Both run forward and backward of one decoder with the same weights and batches, with and without sequence parallelism.
Losses and gradients must agree. Prints medians over the steps of the wall seconds of the slowest rank, the ratios of
wall seconds and of the CPU seconds of all ranks, and the ratio of the bytes that a forward pass saves for the backward
pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from gangline.batch import Batch
from gangline.mesh import Mesh
from gangline.model.init import make_whole_model
from gangline.model.linear import Embedding, Linear
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.plan import plan_decoder
from gangline_basics.model.seams import get_calls
from gangline_basics.precision.plain import Plain
from gangline_parallel_megatron_style.tensor.apply import cut_modules
from gangline_testkit import rank
from gangline_testkit.pool import close_all, get_pool

VOCABULARY, WARM = 256, 3
SIZES = {
    "128": DecoderConfig(vocab_size=VOCABULARY, dim=128, layers=4, heads=8, ffn_dim=384),
    "256": DecoderConfig(vocab_size=VOCABULARY, dim=256, layers=4, heads=8, ffn_dim=688),
}


def batch_of(step: int, rows: int, length: int) -> Batch:
    """Return the batch of a step, equal on all ranks."""
    tokens = torch.randint(0, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(step))
    position, mask = torch.arange(length).expand(rows, length), torch.ones(rows, length, dtype=torch.bool)
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous(), mask, position, torch.arange(rows), step=step)


def ours(config: DecoderConfig, sequence_parallel: bool) -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    """Return the sharded model, and a function: batch -> loss sum, after the backward pass."""
    tree, plan = plan_decoder(config)
    model = make_whole_model(tree, plan, seed=0)
    comm = rank.make_comms(Mesh.of({"tp": rank.world}), False).get_comm("tp")
    first_rows = {}
    for name, parameter in list(model.named_parameters()):
        rule = plan.get_shard_rules(name, parameter.dim()).get("tp")
        if rule is not None:
            path, _, own = name.rpartition(".")
            part = parameter.detach().chunk(comm.size, rule.dim)[comm.index].clone()
            setattr(model.get_submodule(path), own, nn.Parameter(part))
            first_rows[name] = comm.index * part.shape[0]
    precision = Plain(torch.float32, torch.float32)
    losses = get_calls(tree, plan, "loss")
    cut_modules(model, plan, comm, precision, sequence_parallel=sequence_parallel, first_rows=first_rows, losses=losses)

    def step(batch: Batch) -> Tensor:
        loss = model(batch)
        loss.backward()
        return loss.detach()

    return model, step


class TorchEmbedding(nn.Module):
    """torch's embedding with the call signature of the decoder's embedding."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(weight, freeze=False)

    def forward(self, batch: Batch) -> Tensor:
        return self.table(batch.tokens)


class TorchHead(nn.Module):
    """torch's output matmul and cross-entropy with the call signature of the decoder's head."""

    def __init__(self, norm: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self.norm = norm
        self.output = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.output.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        logits = self.output(self.norm(hidden))
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def theirs(config: DecoderConfig, sequence_parallel: bool) -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    """Return the same decoder with `torch.nn` layers, sharded as in torch's tutorial on tensor parallelism."""
    tree, plan = plan_decoder(config)
    model = make_whole_model(tree, plan, seed=0)
    for path, module in list(model.named_modules()):
        if isinstance(module, Linear):
            linear = nn.Linear(module.weight.shape[1], module.weight.shape[0], bias=False)
            linear.weight = module.weight
            model.set_submodule(path, linear)
        elif isinstance(module, Embedding):
            model.set_submodule(path, TorchEmbedding(module.weight.detach()))
    head = TorchHead(model.get_submodule("head.norm"), model.get_parameter("head.weight").detach())
    model.set_submodule("head", head)
    mesh = init_device_mesh("cpu", (rank.world,))
    between = Shard(1) if sequence_parallel else Replicate()
    layers: dict = {
        "embed.table": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head.output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for block in (f"blocks.{index}" for index in range(config.layers)):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w_gate", "feed_forward.w_up"):
            layers[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.wo", "feed_forward.w_down"):
            layers[f"{block}.{name}"] = RowwiseParallel(output_layouts=between)
        if sequence_parallel:
            layers[f"{block}.attention"] = PrepareModuleInput(
                input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
            )
            layers[f"{block}.feed_forward"] = PrepareModuleInput(
                input_layouts=(between,), desired_input_layouts=(Replicate(),)
            )
            layers[f"{block}.attention_norm"] = layers[f"{block}.feed_forward_norm"] = SequenceParallel()
    if sequence_parallel:
        layers["head.norm"] = SequenceParallel()
    parallelize_module(model, mesh, layers)

    def step(batch: Batch) -> Tensor:
        with loss_parallel():
            loss = model(batch)
            loss.backward()
        return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

    return model, step


def clear(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def kept_bytes(model: nn.Module, batch: Batch) -> int:
    """Return the bytes of the distinct storages that a forward pass saves, without parameters."""
    own = {local(p).untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        part = local(x)
        if part.untyped_storage().data_ptr() not in own:
            found[part.untyped_storage().data_ptr()] = part
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), loss_parallel():
        model(batch)
    return sum(x.untyped_storage().nbytes() for x in found.values())


def local(x: Tensor) -> Tensor:
    """Return the plain tensor inside a DTensor, or inside the pending result of a collective."""
    while hasattr(x, "__tensor_flatten__"):
        x = getattr(x, x.__tensor_flatten__()[0][0])
    return x


def measure(
    size: str, sequence_parallel: bool, steps: int, rows: int, length: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, int]]:
    """Return (wall, CPU) seconds of each step of each way on this rank, alternating, and the saved bytes."""
    built = {"ours": ours(SIZES[size], sequence_parallel), "torch": theirs(SIZES[size], sequence_parallel)}
    world = rank.make_comms(Mesh.of({"tp": rank.world}), False).world
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in built}
    for index in range(steps + WARM):
        batch = batch_of(index, rows, length)
        losses = {}
        for name in sorted(built, reverse=bool(index % 2)):
            model, step = built[name]
            clear(model)
            world.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            losses[name] = step(batch)
            if index >= WARM:
                found[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        torch.testing.assert_close(losses["ours"], losses["torch"], rtol=1e-5, atol=0)
    one, other = (built[name][0].get_parameter("blocks.0.attention.wq.weight").grad for name in built)
    assert one is not None
    assert other is not None
    torch.testing.assert_close(one, local(other), rtol=1e-3, atol=1e-4)
    return found, {name: kept_bytes(model, batch) for name, (model, _) in built.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=2, help="sequences per step")
    parser.add_argument("--length", type=int, default=128)
    chosen = parser.parse_args()
    columns = f"{'gangline':>9} {'torch':>9} {'wall':>6} {'CPU':>6} {'saved':>6}"
    print(f"{'width':>5} {'ranks':>5} {'layout':>8} {columns}   (medians, ratios)")
    for size in chosen.sizes:
        for processes in chosen.processes:
            for sequence_parallel in (False, True):
                ranks = get_pool(processes).run(
                    measure, size, sequence_parallel, chosen.steps, chosen.rows, chosen.length, timeout=1800
                )
                wall, cpu = {}, {}
                for name in ("ours", "torch"):
                    by_step = list(zip(*(found[name] for found, _ in ranks), strict=True))
                    wall[name] = statistics.median(max(w for w, _ in step) for step in by_step)
                    cpu[name] = statistics.median(sum(c for _, c in step) for step in by_step)
                kept = ranks[0][1]
                ratios = f"{wall['ours'] / wall['torch']:>6.3f} {cpu['ours'] / cpu['torch']:>6.3f}"
                times = f"{wall['ours'] * 1e3:>6.1f} ms {wall['torch'] * 1e3:>6.1f} ms"
                sharded = "tp, seq" if sequence_parallel else "tp"
                memory = kept["ours"] / kept["torch"]
                print(f"{size:>5} {processes:>5} {sharded:>8} {times} {ratios} {memory:>6.3f}", flush=True)
        close_all()


if __name__ == "__main__":
    main()
