"""Model of a run in progress, on all ranks: rank 0 sends requests, and all ranks compute.

T tokens
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from gangline.batch import Batch
from gangline.comm.base import Comms
from gangline.comm.objects import gather_json
from gangline.config import Run
from gangline.runtime import Runtime, Sampling, Written
from gangline_basics.sampling.sampler import Writer
from gangline_finetune.evaluate.text_model import AskedRow, TextModel, make_lm_class


class LiveWriter(Writer):
    """Writer on all ranks: in `serve`, other ranks repeat each call of rank 0, until rank 0 calls `tell`.

    Errors of the runtime are raised on all ranks; `broken` is then true on rank 0.
    """

    def __init__(self, run: Run, runtime: Runtime, comms: Comms) -> None:
        super().__init__(run)
        self.runtime, self.comms, self.device = runtime, comms, comms.device
        self.broken = False

    # --- on all ranks -----------------------------------------------------------------------------------------------

    def _score(self, rows: list[AskedRow]) -> list[float]:
        index, width = self.runtime.data_coordinate
        share = -(-len(rows) // width)
        padded_rows = [*((tokens, count) for tokens, count, _ in rows), *[([0, 0], 0)] * (share * width - len(rows))]
        batches = [self._batch(*row) for row in padded_rows[index * share : (index + 1) * share]]
        return self.runtime.score(batches)[: len(rows)].tolist()

    def _batch(self, tokens: list[int], count: int) -> Batch:
        """Make a one-row batch, padded to the run's sequence length; the loss mask selects the last `count` tokens."""
        T, stop = self.context, len(tokens) - 1
        tokens_1T, targets_1T = torch.zeros(1, T, dtype=torch.int64), torch.zeros(1, T, dtype=torch.int64)
        tokens_1T[0, :stop], targets_1T[0, :stop] = torch.tensor(tokens[:-1]), torch.tensor(tokens[1:])
        place_1T = torch.arange(T)[None]
        counts_1T = (place_1T >= stop - count) & (place_1T < stop)
        batch = Batch(
            tokens=tokens_1T,
            targets=targets_1T,
            loss_mask=counts_1T,
            position=place_1T,
            sample=torch.zeros(1, dtype=torch.int64),
        )
        return batch.to(self.device)

    def _write(self, starts: list[list[int]], how: dict[str, Any], stop: list[str]) -> list[Written]:
        sampling = Sampling(**{**how, "ends": frozenset(how["ends"])})
        return self.runtime.generate(starts, sampling, stop=self.find_stop(stop))

    # --- requests on rank 0, `serve` on other ranks -- --------------------------------------------------------------

    def score(self, rows: list[AskedRow]) -> list[float]:
        """Return the log-likelihood of each row's last tokens. Call it on rank 0."""
        return self._call_together("score", rows)

    def generate(self, starts: Sequence[Sequence[int]], sampling: Sampling, stop: Sequence[str] = ()) -> list[Written]:
        how = vars(sampling) | {"ends": sorted(sampling.ends)}
        return self._call_together("write", [list(start) for start in starts], how, list(stop))

    def tell(self, answer: Any) -> Any:
        """End `serve` on the other ranks, which return `answer`. Call it on rank 0."""
        return gather_json(self.comms.world, ["end", answer])[0][1]

    def serve(self) -> Any:
        """Serve rank 0's requests until `tell`, and return its answer. Call it on every other rank."""
        while True:
            what, *arguments = gather_json(self.comms.world, None)[0]
            if what == "end":
                return arguments[0]
            self._get_function(what)(*arguments)

    def _call_together(self, what: str, *asked: Any) -> Any:
        gather_json(self.comms.world, [what, *asked])
        try:
            return self._get_function(what)(*asked)
        except BaseException:
            self.broken = True
            raise

    def _get_function(self, what: str) -> Callable[..., Any]:
        return self._score if what == "score" else self._write


class LiveModel(TextModel):
    """Model for lm-eval's requests, on rank 0. batch: batch size in rows per data-parallel rank."""

    writer: LiveWriter

    def __init__(self, writer: LiveWriter, batch: int, likelihoods_alone: Collection[str]) -> None:
        super().__init__(writer, batch * writer.runtime.data_coordinate[1], likelihoods_alone)

    def score_rows(self, rows: list[AskedRow]) -> list[tuple[float, bool]]:
        """Score rows; a continuation is the likeliest if greedy generation yields it."""
        values = [value for part in self._split_batches(rows) for value in self.writer.score(part)]
        return list(zip(values, self._check_likeliest(rows), strict=True))

    def _check_likeliest(self, rows: list[AskedRow]) -> list[bool]:
        verdicts = [not row.answer_length for row in rows]
        for count in sorted({row.answer_length for row in rows if row.greedy and row.answer_length}):
            of_length = [number for number, row in enumerate(rows) if row.greedy and row.answer_length == count]
            for part in self._split_batches(of_length):
                answers = self.writer.generate([rows[n].tokens[:-count] for n in part], Sampling(tokens=count))
                for number, one in zip(part, answers, strict=True):
                    verdicts[number] = one.tokens == rows[number].tokens[-count:]
        return verdicts

    def _split_batches(self, rows: list[Any]) -> list[list[Any]]:
        return [rows[start : start + self.batch] for start in range(0, len(rows), self.batch)]


def make_live_lm(writer: LiveWriter, batch: int, likelihoods_alone: Collection[str]) -> Any:
    """Make a `LiveModel` that is an instance of lm-eval's `LM`."""
    return make_lm_class(LiveModel)(writer, batch, likelihoods_alone)
