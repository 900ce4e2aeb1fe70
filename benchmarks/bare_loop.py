"""Train with a loop without a framework: the baseline for gangline's loop, on the same model and batches."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from gangline.config.schema import Run
from gangline.data.base import DataSource
from gangline.data.expand import expand
from gangline.data.sample_reader import KeptMemory, stack_samples
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.model.init import initialise
from gangline.shard import Shard
from gangline_basics.optimizer.config import Adamw


class BareLoop:
    """Training in forty lines of PyTorch: model, AdamW, gradient clipping, step."""

    def __init__(self, run: Run, source: DataSource, schedule: Callable[[int], float]) -> None:
        tree, plan = compose_model(run)
        self.run, self.source, self.schedule, self.step = run, source, schedule, 0
        self.memory = KeptMemory(torch.device("cpu"))
        self.model = materialise(construct(tree), plan)
        named = list(self.model.named_parameters())
        shards = [Shard(f"model/{n}", tuple(p.shape), p.dtype, (0,) * p.dim(), p.data) for n, p in named]
        initialise(shards, plan, run.seed)
        decayed = [p for _, p in named if p.dim() > 1]
        other = [p for _, p in named if p.dim() <= 1]
        o = run.optimizer
        assert isinstance(o, Adamw)
        assert o.clip_norm is not None
        self.clip_norm = o.clip_norm
        betas = o.betas[0], o.betas[1]
        groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": other, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=o.learning_rate, betas=betas, eps=o.eps, fused=True)
        if torch.distributed.is_initialized():
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)

    def train(self, steps: int) -> list[float]:
        losses = []
        size = self.run.batch.global_size
        for _ in range(steps):
            numbers = list(range(self.step * size, (self.step + 1) * size))
            samples = [self.source.sample(i) for i in numbers]
            batch = expand(stack_samples(samples, numbers, self.memory), self.step, torch.device("cpu"))
            loss = self.model(batch) / int(batch.loss_mask.sum())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.run.optimizer.learning_rate * self.schedule(self.step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses


def main() -> None:
    """Run one step of the default model on this rank of torchrun, then print the time."""
    import time

    from gangline.config.defaults import build_default_run
    from gangline.plugin.registry import build

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
    run = build_default_run()
    bare = BareLoop(run, build(run.data, run, "train"), build(run.schedule, run))
    bare.train(1)
    print(f"first step done at {time.time()}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
