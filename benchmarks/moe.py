"""Compare a mixture-of-experts layer with others of the same size, and its dispatch with a bare all-to-all.

    python benchmarks/moe.py layer --tokens 512 --rounds 9
    python benchmarks/moe.py dispatch --processes 2 4 8 --mebibytes 16

layer     forward and backward in one process, float32, one way after another in each round; medians. Baselines: a loop
          over the experts that selects each expert's tokens, transformers' Mixtral block, and a dense layer with the
          same active FLOPs. Also prints the bytes that gangline's layer saves for the backward pass, relative to the
          bytes of its own tensors: rows in and out, two matmul outputs, the router's outputs
dispatch  to the experts and back, forward only, compared with one all_to_all_single of the same bytes in each
          direction; medians of the slowest rank. Also prints the bytes sent between ranks, relative to the minimum
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.comm.base import Comm, Pending, Splits, Transfers
from gangline.comm.wrap import Wrapped
from gangline.mesh import Mesh
from gangline.model.build import construct
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_moe.config import MoeOptions
from gangline_moe.dispatch.dispatcher import TokenDispatcher
from gangline_moe.dispatch.permute import sort_by_expert
from gangline_moe.edit import make_layer_node
from gangline_moe.routers.config import Softmax
from gangline_testkit import rank
from gangline_testkit.pool import close_all, get_pool

# (experts, top_k, width of the model, width of an expert)
SIZES = ((8, 1, 256, 512), (8, 2, 256, 512), (16, 2, 256, 256), (64, 4, 256, 128), (64, 8, 256, 64), (256, 8, 256, 64))
WARM = 2


def filled(module: nn.Module) -> nn.Module:
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for array in module.state_dict().values():
            array.normal_(std=0.05)
    return module


class Loop(nn.Module):
    """Baseline: for each expert select its tokens, multiply, add the results."""

    def __init__(self, ours: nn.Module, top_k: int) -> None:
        super().__init__()
        names = ("router.gate", "experts.w_up", "experts.w_down", "experts.w_gate")
        weights = (ours.get_parameter(f"{name}.weight").detach().clone() for name in names)
        self.gate, self.up, self.down, self.act = (nn.Parameter(weight) for weight in weights)
        self.top_k = top_k

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, expert = F.linear(flat, self.gate).softmax(-1).topk(self.top_k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        y = torch.zeros_like(flat)
        for e in range(len(self.up)):
            token, k = torch.where(expert == e)
            mine = flat[token]
            out = F.linear(F.silu(F.linear(mine, self.act[e])) * F.linear(mine, self.up[e]), self.down[e])
            y.index_add_(0, token, out * weight[token, k, None])
        return y.view_as(x)


def theirs(experts: int, top_k: int, dim: int, hidden: int) -> nn.Module:
    """Return transformers' block with default options."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=dim, intermediate_size=hidden, num_local_experts=experts, num_experts_per_tok=top_k
    )
    return filled(MixtralSparseMoeBlock(config))


def once(module: nn.Module, x: Tensor) -> float:
    for parameter in module.parameters():
        parameter.grad = None
    began = time.perf_counter()
    module(x).sum().backward()
    return time.perf_counter() - began


def kept(module: nn.Module, x: Tensor) -> int:
    """Return the bytes of the distinct storages that a forward pass saves, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(found.values())


def layers(tokens: int, rounds: int) -> None:
    torch.set_num_threads(1)
    columns = f"{'gangline':>8} {'loop':>7} {'Mixtral':>8} {'dense':>7}   {'saved':>6}"
    print(f"{tokens} tokens, load {os.getloadavg()[0]:.1f}   (gangline in ms; others relative to it; saved over own)")
    print(f"{'experts':>7} {'top':>4} {'width':>6} {'expert':>6}  {columns}")
    for experts, top_k, dim, hidden in SIZES:
        options = MoeOptions(experts=experts, top_k=top_k, ffn_dim=hidden, router=Softmax(global_aux_loss=0))
        ours = filled(construct(make_layer_node(FeedForwardNode(dim=dim, ffn_dim=hidden), options)))
        dense = filled(construct(FeedForwardNode(dim=dim, ffn_dim=hidden * top_k)))
        built = {"ours": ours, "loop": Loop(ours, top_k), "Mixtral": theirs(experts, top_k, dim, hidden)}
        built["dense"] = dense
        x = torch.randn(1, tokens, dim).requires_grad_()
        torch.testing.assert_close(ours(x), built["loop"](x), rtol=1e-4, atol=1e-5)
        times: dict[str, list[float]] = {name: [] for name in built}
        for index in range(rounds + WARM):
            for name in sorted(built, reverse=bool(index % 2)):
                seconds = once(built[name], x)
                if index >= WARM:
                    times[name].append(seconds)
        medians = {name: statistics.median(found) for name, found in times.items()}
        ratios = [medians[name] / medians["ours"] for name in ("loop", "Mixtral", "dense")]
        pairs = tokens * top_k
        tensors = 4 * (pairs * (2 * dim + 2 * hidden) + tokens * (dim + 2 * experts + top_k)) + 8 * 3 * pairs
        text = f"{medians['ours'] * 1e3:8.2f} {ratios[0]:7.2f} {ratios[1]:8.2f} {ratios[2]:7.2f}"
        print(f"{experts:7} {top_k:4} {dim:6} {hidden:6}  {text}   {kept(ours, x) / tensors:6.2f}", flush=True)


class Counting(Wrapped):
    """A communicator that counts the bytes of rows sent to other ranks."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.sent = 0

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        if x.dim() > 1:
            assert in_splits is not None
            self.sent += (sum(in_splits) - in_splits[self.index]) * x[:1].numel() * x.element_size()
        return super()._all_to_all(x, in_splits, out_splits, background)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        self.sent += sum(x.numel() * x.element_size() for x, peer in sends if peer != self.index)
        return super()._exchange(sends, recvs, background)


def dispatched(mebibytes: int, rounds: int) -> tuple[list[tuple[float, float]], float]:
    """Return (gangline, bare) seconds of each round on this rank, and bytes sent relative to the minimum."""
    comm = rank.make_comms(Mesh.of({"dp_shard": rank.world}), False).get_comm("dp_shard")
    width, experts = 1024, 8
    rows_AD = torch.randn(mebibytes * 2**20 // (4 * width), width)
    expert = torch.randint(0, experts, (len(rows_AD), 1), generator=torch.Generator().manual_seed(rank.index))
    made = sort_by_expert(expert, experts)
    counts = made.counts
    per_rank = counts.view(comm.size, -1).sum(1)
    arriving = torch.empty_like(per_rank)
    dist.all_to_all_single(arriving, per_rank)
    to, of = per_rank.tolist(), arriving.tolist()

    def ours(comm: Comm) -> None:
        dispatcher = TokenDispatcher(comm, rows_AD, counts)
        dispatcher.combine(dispatcher.dispatch())

    def bare() -> None:
        arrived = rows_AD.new_empty(sum(of), width)
        dist.all_to_all_single(arrived, rows_AD, of, to)
        dist.all_to_all_single(torch.empty_like(rows_AD), arrived, to, of)

    def timed(run: Callable[[], None]) -> float:
        comm.barrier()
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    seconds = []
    with torch.no_grad():
        for index in range(rounds + WARM):
            if index % 2:
                bare_seconds = timed(bare)
                seconds.append((timed(lambda: ours(comm)), bare_seconds))
            else:
                seconds.append((timed(lambda: ours(comm)), timed(bare)))
        counted = Counting(comm)
        ours(counted)
    least = (sum(to) - to[comm.index] + sum(of) - of[comm.index]) * width * 4
    return seconds[WARM:], counted.sent / least


def dispatches(processes: list[int], mebibytes: int, rounds: int) -> None:
    print(f"{mebibytes} MiB per rank, load {os.getloadavg()[0]:.1f}")
    print(f"{'ranks':>5} {'gangline':>9} {'bare':>9} {'ratio':>6} {'bytes/minimum':>14}")
    for world in processes:
        of_ranks = get_pool(world).run(dispatched, mebibytes, rounds, timeout=1800)
        slowest = [
            (max(ours for ours, _ in one), max(bare for _, bare in one))
            for one in zip(*(seconds for seconds, _ in of_ranks), strict=True)
        ]
        ours, bare = (statistics.median(column) for column in zip(*slowest, strict=True))
        ratio = statistics.median(one / other for one, other in slowest)
        share = max(found for _, found in of_ranks)
        print(f"{world:5} {ours * 1e3:6.0f} ms {bare * 1e3:6.0f} ms {ratio:6.2f} {share:14.3f}", flush=True)
        close_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["layer", "dispatch", []], default=[])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--mebibytes", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    if chosen.what in ([], ["layer"], ["layer", "dispatch"]):
        layers(chosen.tokens, chosen.rounds)
    if chosen.what in ([], ["dispatch"], ["layer", "dispatch"]):
        dispatches(chosen.processes, chosen.mebibytes, chosen.rounds)


if __name__ == "__main__":
    main()
