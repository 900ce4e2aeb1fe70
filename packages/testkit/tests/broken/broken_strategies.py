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
    """Built as every strategy is."""

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
    """What wraps a Comm cannot tell its sums of gradients from others."""

    def _reduce(self):
        RowsRuntime._reduce.__wrapped__(self)


class ForgetsVectors(Broken):
    """Vectors, held whole, keep the gradient of this rank's own samples."""

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
    """Every holder of a vector adds its squares to the norm."""

    def _compute_global_norm(self):
        squares = sum(tensor.grad.double().square().sum() for _, _, tensor in self.gradients())
        return self.comm.all_reduce(squares).sqrt()


class StepsOnNan(Broken):
    def step(self, microbatches):
        return replace(super().step(microbatches), finite=True)


class SaysTheMean(Broken):
    """A rank's own loss is its share of what all ranks came to."""

    def step(self, microbatches):
        result = super().step(microbatches)
        return replace(result, own_loss_sum=result.loss_sum * result.own_tokens / result.tokens)


class SharesFolds(Broken):
    """What lives on a fold is divided by the fold's size, as if its ranks held copies."""

    def _reduce(self):
        super()._reduce()
        for name, part, tensor in self.gradients():
            if part.comm is not self.comm and not self.registry[f"model/{name}"].divisions[0].rows:
                tensor.grad /= 2


class Stale(Broken):
    """Takes up what the optimizer wrote once, and never again."""

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
    """Shards say that they lie one row further down than they do."""

    def _list_shards(self, part):
        shards = super()._list_shards(part)
        for shard in shards:
            if part.cut and shard.offset[0] + shard.local.shape[0] < shard.global_shape[0]:
                shard.offset = (shard.offset[0] + 1, *shard.offset[1:])
        return shards


class ArrivalOrder(Broken):
    """Adds the ranks' parts in another order than that of their ranks."""

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
    """Modules are not told that they are evaluated."""

    def evaluate(self, microbatches):
        self.model.eval = lambda: self.model
        return super().evaluate(microbatches)


class EvaluatesByShare(Broken):
    """Adds up what each rank has, and then the ranks: other bits for another number of them."""

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
    """What a rank has of a matrix is mapped as if it were one."""

    def map_matrices(self, function, inputs):
        for name, pieces in inputs:
            yield name, [function(piece.flatten(0, -2), MatrixId(name, 0)).view_as(piece) for piece in pieces]


class MapsElsewhere(Broken):
    """Says of every matrix that the first rank maps it."""

    def find_matrix_owners(self, names):
        return dict.fromkeys(super().find_matrix_owners(names), 0)


class ClipsVectors(Broken):
    """Scales the vectors only."""

    def clip(self, max_norm):
        value = super().clip(None)
        if max_norm is not None:
            vectors = [tensor for _, part, tensor in self.gradients() if not part.cut]
            clip(vectors, max_norm, torch.tensor(value, dtype=torch.float64), value)
        return value


class ClipsByTheStep(Broken):
    """Scales by the norm that the gradients had at the end of the step."""

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
    """The last rank's samples score 0."""

    def score(self, batches, losses_per_sample=1):
        scores = super().score(batches, losses_per_sample)
        scores[-len(batches) :] = 0
        return scores


class ScoresBackwards(Broken):
    """The shares follow each other in the opposite order of their ranks."""

    def score(self, batches, losses_per_sample=1):
        return super().score(batches, losses_per_sample).view(self.comm.size, -1).flip(0).flatten()
