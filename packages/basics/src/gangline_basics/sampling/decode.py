"""Writing texts token by token: all prompts at once with what modules keep, or each by itself from its beginning.

B batch, T tokens, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gangline.batch import Batch
from gangline.model.cache import Cache
from gangline.runtime import Sampling, Stop, Why, Written
from gangline_basics.sampling.draw import draw

Forward = Callable[[Batch], torch.Tensor]  # (B, V): logits of what follows each row's last token, the same on all ranks


def decode(
    forward: Forward,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    cached: bool,
    device: torch.device,
    stop: Stop | None = None,
    first: int = 0,
) -> list[Written]:
    """What follows each prompt (of at least one token), the same as if it were alone.

    cached: whether all modules say how they take one more token (`Node.get_decoding`). Where one does not, it may look
    at other rows or at later tokens, so each text is written by itself and computed anew for each token.
    first: number of the first prompt among all that are written; further ones count on.
    """
    if not prompts or not sampling.tokens:
        return [Written([], "length") for _ in prompts]
    if cached:
        return _Rows(prompts, sampling, device, stop, first, cached).write(forward)
    alone = (_Rows([prompt], sampling, device, stop, first + i, cached) for i, prompt in enumerate(prompts))
    return [text for rows in alone for text in rows.write(forward)]


class _Rows:
    """Texts that are written side by side."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        device: torch.device,
        stop: Stop | None,
        first: int,
        cached: bool,
    ) -> None:
        self.prompts, self.sampling, self.device, self.stop = prompts, sampling, device, stop
        self.numbers_B = torch.arange(first, first + len(prompts))
        self.written: list[list[int]] = [[] for _ in prompts]
        self.why: list[Why | None] = [None] * len(prompts)
        self.longest = max(map(len, prompts))
        self.cache = Cache(self.longest + sampling.tokens) if cached else None

    def write(self, forward: Forward) -> list[Written]:
        batch = self._make_first()
        for step in range(self.sampling.tokens):
            new_tokens = draw(forward(batch), self.sampling, self.numbers_B, step)
            for row, token in enumerate(new_tokens):
                self._take(row, token)
            if None not in self.why or step + 1 == self.sampling.tokens:
                break
            batch = self._make_next(new_tokens, step)
        return [Written(tokens, why or "length") for tokens, why in zip(self.written, self.why, strict=True)]

    def _take(self, row: int, token: int) -> None:
        if self.why[row] is not None:
            return
        if token in self.sampling.ends:
            self.why[row] = "end"
            return
        self.written[row].append(token)
        if self.stop is not None and self.stop(self.written[row]):
            self.why[row] = "stop"

    def _make_first(self) -> Batch:
        """The prompts, filled up on the left with tokens of another document."""
        gaps_B1 = torch.tensor([[self.longest - len(prompt)] for prompt in self.prompts])
        tokens_BT = torch.tensor([[0] * (self.longest - len(prompt)) + list(prompt) for prompt in self.prompts])
        position_BT = torch.arange(self.longest) - gaps_B1
        document_BT = (position_BT >= 0).long() if bool(gaps_B1.any()) else None
        return self._make_batch(tokens_BT, position_BT.clamp(min=0), document_BT)

    def _make_next(self, drawn: list[int], step: int) -> Batch:
        if self.cache is None:
            row = torch.tensor([[*self.prompts[0], *self.written[0]]])
            return self._make_batch(row, torch.arange(row.shape[1])[None], None)
        position_B1 = torch.tensor([[len(prompt) + step] for prompt in self.prompts])
        padded = any(len(prompt) < self.longest for prompt in self.prompts)
        return self._make_batch(
            torch.tensor(drawn)[:, None], position_B1, torch.ones_like(position_B1) if padded else None
        )

    def _make_batch(
        self, tokens_BT: torch.Tensor, position_BT: torch.Tensor, document_BT: torch.Tensor | None
    ) -> Batch:
        return Batch(
            tokens=tokens_BT,
            targets=tokens_BT,  # nobody asks for a loss here
            loss_mask=torch.ones_like(tokens_BT, dtype=torch.bool),
            position=position_BT,
            document=document_BT,
            sample=self.numbers_B,
            cache=self.cache,
        ).to(self.device)
