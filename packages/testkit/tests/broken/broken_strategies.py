"""Strategies with one fault each, otherwise equal to the toy `rows`."""

from __future__ import annotations

from dataclasses import replace

import torch

from gangline.comm.ordered import sum_rows
from gangline.runtime import MatrixId
from gangline_basics.parallel.microbatch import count_tokens, make_frame
from gangline_basics.parallel.norm import clip
from gangline_testkit.toys.rows import RowsRuntime


class Broken(RowsRuntime):
    """The toy `rows`, constructed from (config, job) like every strategy."""

    def __init__(self, config, job):
        self.mesh = job.mesh
        super().__init__(job)

    def gradients(self):
        for name, part in self.parts.items():
            for tensor in part.tensors:
                yield name, part, tensor


class Averages(Broken):
    def _reduce(self):
        super()._reduce()
        for _, _, tensor in self.gradients():
            tensor.grad /= self.comm.size


class Unmarked(Broken):
    """Sums gradients without marking the traffic, so wrappers of a Comm do not see its purpose."""

    def _reduce(self):
        RowsRuntime._reduce.__wrapped__(self)


class ForgetsVectors(Broken):
    """Keeps the local gradients of replicated vectors instead of their sum over the ranks."""

    def _reduce(self):
        own = {name: self.weights[name].grad.clone() for name, part in self.parts.items() if not part.cut}
        super()._reduce()
        for name, part, tensor in self.gradients():
            if not part.cut:
                tensor.grad = own[name]


class LocalTokens(Broken):
    def _compute_divisor(self, tokens, microbatches):
        return int(count_tokens(microbatches, self.device)) * self.comm.size


class CountsTwice(Broken):
    """Adds the squares of a replicated vector to the norm on every rank that holds it."""

    def _compute_global_norm(self):
        squares = sum(tensor.grad.double().square().sum() for _, _, tensor in self.gradients())
        return self.comm.all_reduce(squares).sqrt()


class StepsOnNan(Broken):
    def step(self, microbatches):
        return replace(super().step(microbatches), finite=True)


class SaysTheMean(Broken):
    """Reports the mean loss of all ranks as a rank's own loss."""

    def step(self, microbatches):
        result = super().step(microbatches)
        return replace(result, own_loss_sum=result.loss_sum * result.own_tokens / result.tokens)


class SharesFolds(Broken):
    """Halves the gradients of arrays on a fold, as if its ranks held copies."""

    def _reduce(self):
        super()._reduce()
        for name, part, tensor in self.gradients():
            if part.comm is not self.comm and not self.registry[f"model/{name}"].divisions[0].rows:
                tensor.grad /= 2


class Stale(Broken):
    """Copies the weights from the optimizer into the model only once."""

    fresh = False

    def _refresh(self):
        if not self.fresh:
            super()._refresh()
        self.fresh = True
        for weight in self.weights.values():
            weight.grad = None


class NeverTells(Broken):
    def finish_update(self):
        pass


class Misplaces(Broken):
    """Reports offsets of shards that are one row too high."""

    def _list_shards(self, part):
        shards = super()._list_shards(part)
        for shard in shards:
            if part.cut and shard.offset[0] + shard.local.shape[0] < shard.global_shape[0]:
                shard.offset = (shard.offset[0] + 1, *shard.offset[1:])
        return shards


class ArrivalOrder(Broken):
    """Sums the gradients of the ranks in reverse rank order."""

    def _materialise(self, model):
        super()._materialise(model)
        for part in self.parts.values():
            part.reduce_rows = lambda gradient, part=part: backwards(part, gradient)


def backwards(part, gradient):
    if not part.cut:
        return [part.comm.all_reduce(gradient.clone())]
    counts = [stop - start for start, stop in zip(part.bounds, part.bounds[1:], strict=False)]
    mine = counts[part.comm.index]
    rows = part.comm.all_to_all(gradient.reshape(-1, part.width).contiguous(), counts, [mine] * part.comm.size)
    return part.split(sum_rows(rows.view(part.comm.size, mine, part.width).flip(0)))


class EvaluatesAlone(Broken):
    @torch.no_grad()
    def evaluate(self, microbatches):
        from gangline.model import forward_context

        self._refresh()
        loss = 0.0
        for index, batch in enumerate(microbatches):
            with forward_context.frame(make_frame(batch, index, self.seed, None)):
                loss += float(self.axes.compute_loss(batch))
        return loss, int(count_tokens(microbatches, self.device))


class EvaluatesInTraining(Broken):
    """Leaves modules in training mode during evaluation."""

    def evaluate(self, microbatches):
        self.model.eval = lambda: self.model
        return super().evaluate(microbatches)


class EvaluatesByShare(Broken):
    """Sums losses on each rank first and then over the ranks, so the bits depend on the number of ranks."""

    def evaluate(self, microbatches):
        total = torch.zeros(2, dtype=torch.float64)
        for loss in self._compute_losses(microbatches):
            total[0] += loss
        total[1] = count_tokens(microbatches, self.device)[0]
        loss_sum, tokens = self.comm.all_reduce(total).tolist()
        return loss_sum, int(tokens)


class RepeatsMatrices(Broken):
    """Every rank maps every matrix."""

    def map_matrices(self, function, inputs):
        for name, pieces in inputs:
            part = self.parts[name]
            whole = part.gather_rows(pieces)
            matrices = whole.view(-1, *whole.shape[-2:])
            mapped = torch.stack([function(x, MatrixId(name, i)) for i, x in enumerate(matrices)]).view_as(whole)
            yield name, [mapped[box.slice_within(part.place)] for box in part.boxes]


class MapsPieces(Broken):
    """Maps a rank's piece of a matrix as if it were a complete matrix."""

    def map_matrices(self, function, inputs):
        for name, pieces in inputs:
            yield name, [function(piece.flatten(0, -2), MatrixId(name, 0)).view_as(piece) for piece in pieces]


class MapsElsewhere(Broken):
    """Names the first rank as the owner of every matrix."""

    def find_matrix_owners(self, names):
        return dict.fromkeys(super().find_matrix_owners(names), 0)


class ClipsVectors(Broken):
    """Clips only the gradients of vectors."""

    def clip(self, max_norm):
        value = super().clip(None)
        if max_norm is not None:
            vectors = [tensor for _, part, tensor in self.gradients() if not part.cut]
            clip(vectors, max_norm, torch.tensor(value, dtype=torch.float64), value)
        return value


class ClipsByTheStep(Broken):
    """Clips by the norm that the gradients had at the end of the step, although they may have changed since."""

    def step(self, microbatches):
        result = super().step(microbatches)
        self.value = super().clip(None)
        return result

    def clip(self, max_norm):
        if max_norm is not None:
            leaves = [tensor for _, _, tensor in self.gradients()]
            clip(leaves, max_norm, torch.tensor(self.value, dtype=torch.float64), self.value)
        return self.value


class ForgetsAShare(Broken):
    """Sets the scores of the last rank's samples to 0."""

    def score(self, batches, losses_per_sample=1):
        scores = super().score(batches, losses_per_sample)
        scores[-len(batches) :] = 0
        return scores


class ScoresBackwards(Broken):
    """Returns the scores of the ranks in reverse rank order."""

    def score(self, batches, losses_per_sample=1):
        return super().score(batches, losses_per_sample).view(self.comm.size, -1).flip(0).flatten()
