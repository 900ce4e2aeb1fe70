"""Callbacks and health checks with one fault each, which their conformance suites must detect by name."""

from __future__ import annotations

import torch

from gangline.comm.wrap import Wrapped
from gangline.health import Action, Response
from gangline.shard import Layout, Registry
from gangline_testkit.toys.nan import NanCheck
from gangline_testkit.toys.previous import PreviousCallback


class Meddles(PreviousCallback):
    @torch.no_grad()
    def after_step(self, record, applied):
        for named in self.runtime.parameters():
            for piece in named.pieces:
                piece.tensor.mul_(1 - 1e-9)
        return super().after_step(record, applied)


class ForgetsState(PreviousCallback):
    def state(self):
        return {}

    def load_state(self, state):
        pass


class ForgetsArrays(PreviousCallback):
    """Keeps its arrays out of the registry, so checkpoints do not contain them."""

    def attach(self, *parts):
        super().attach(*parts)
        self.registry, self.kept = None, self.arrays
        self.sum = 0.0

    def shards(self):
        return ()

    def list_validated_weights(self):
        return ()

    def after_step(self, record, applied):
        self.sum += sum(float(shard.local.sum()) for shard in self.kept)
        return {"sum": self.sum}


class OwnMetrics(PreviousCallback):
    def attach(self, runtime, optimizer, comms, store, device):
        super().attach(runtime, optimizer, comms, store, device)
        self.rank = comms.rank

    def after_step(self, record, applied):
        return {"applied": self.applied + self.rank}


class SaysWhole(PreviousCallback):
    """Registers its arrays as replicated, although each rank holds a shard."""

    def attach(self, *parts):
        super().attach(*parts)
        layouts = {name: Layout(self.registry[name].shape, self.registry[name].dtype) for name in self.registry}
        self.registry = Registry.of(self.runtime.registry.mesh, layouts)


class AsksOnError(PreviousCallback):
    def attach(self, runtime, optimizer, comms, store, device):
        super().attach(runtime, optimizer, comms, store, device)
        self.comms = comms

    def on_error(self, error):
        self.comms.world.barrier()


class NeedsItsState(PreviousCallback):
    def begin(self, step):
        if step:
            assert self.applied == step, "it has not seen every step"


class LeavesOthers(PreviousCallback):
    """Returns its own arrays from `may_drop`, also for arrays of other parts."""

    def may_drop(self, names):
        return [f"{self.place}/previous/{name.rpartition('/')[2]}" for name in names]


class HalvedComm(Wrapped):
    """Halves tensors before each all-reduce."""

    def _all_reduce(self, x, op, background):
        return super()._all_reduce(x.mul_(0.5), op, background)


class SwappedComm(Wrapped):
    def __init__(self, inner):
        super().__init__(inner)
        self.index = self.size - 1 - self.index


class HalvesTraffic(PreviousCallback):
    """Its configuration wraps the communicator of every axis in `HalvedComm`."""


class SwapsRanks(PreviousCallback):
    """Its configuration wraps the communicator of every axis in `SwappedComm`."""


class SetsVariables(PreviousCallback):
    """Its configuration changes os.environ in `get_environment`."""


class SaysNumbers(PreviousCallback):
    """Its configuration returns a number as the value of an environment variable."""


class CountsItself(NanCheck):
    """Counts its responses in an attribute that is not part of its state."""

    answers = 0

    def respond(self, agreed, record):
        if agreed.select("not-finite"):
            self.answers += 1
            return Response(Action.ROLL_BACK if self.answers < 3 else Action.STOP, ("not-finite",))
        return None


class Remembers(NanCheck):
    """Bases its response on earlier steps, which a restarted process has not seen."""

    def respond(self, agreed, record):
        return Response(Action.ROLL_BACK, ("not-finite",)) if self.row and agreed.select("not-finite") else None


class Gathers(NanCheck):
    """Runs a collective in `before_update`, which core calls on each rank separately."""

    def attach(self, runtime, optimizer, comms, store, device):
        self.world = comms.world

    def before_update(self, loss, grad_norm):
        self.world.all_reduce(torch.tensor([loss]), "max")
        return ()


class Cries(NanCheck):
    """Raises an error in every step."""

    def before_update(self, loss, grad_norm):
        raise KeyError(loss)
