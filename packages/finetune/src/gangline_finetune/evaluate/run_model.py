"""Model of a run, loaded unsharded from a checkpoint into one process.

B batch, T tokens, V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gangline import UserError
from gangline.batch import Batch
from gangline.config import Run
from gangline_basics.sampling.sampler import Sampler
from gangline_finetune.evaluate.text_model import AskedRow, TextModel, make_lm_class
from gangline_models.hugging_face.contract import get_model_format


def load_lm(run_dir: str, **options: Any) -> Any:
    """Load the model of a run as lm-eval's `LM`. options: see `RunModel`. Raises UserError without a checkpoint."""
    return make_lm_class(RunModel)(run_dir, **options)


def read_context_length(run: Run) -> int:
    """Return the context length in tokens that lm-eval uses for the exported model, from its config.json.

    With learned positions or scaled RoPE it may exceed the run's sequence length. For a model that cannot be exported,
    it is the run's sequence length.
    """
    row_length, format = run.batch.sequence_length, get_model_format(run.model)
    try:
        config = format.write(run.model, "float32", row_length) if format else {}
    except UserError:
        return row_length
    return int(config.get("n_positions") or config.get("max_position_embeddings") or row_length)


class RunModel(TextModel):
    """Model loaded from a checkpoint, by default the newest, with the context length of the exported model.

    Raises UserError if there is no checkpoint.
    """

    def __init__(self, run_dir: str, *, checkpoint: str | None = None, batch: int = 8) -> None:
        self.sampler = Sampler(run_dir, checkpoint=checkpoint)
        self.sampler.context = read_context_length(self.sampler.run)
        super().__init__(self.sampler, batch)
        self.model = self.sampler.model.eval()
        self._device = next(self.model.parameters()).device

    def score_rows(self, rows: list[AskedRow]) -> list[tuple[float, bool]]:
        """Score rows, in batches of similar length."""
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(rows)
        order = sorted(range(len(rows)), key=lambda n: -len(rows[n].tokens))
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            logits_BTV = self._compute_logits([rows[n].tokens[:-1] for n in numbers])
            for number, logits_TV in zip(numbers, logits_BTV, strict=True):
                tokens, count, _ = rows[number]
                stop = len(tokens) - 1
                p_TV = logits_TV[stop - count : stop].log_softmax(-1)
                answer_tokens = torch.tensor(tokens[len(tokens) - count :], device=p_TV.device)
                likeliest = bool((p_TV.argmax(-1) == answer_tokens).all())
                scores[number] = (float(p_TV.gather(-1, answer_tokens[:, None]).sum()), likeliest)
        return scores

    @torch.inference_mode()
    def _compute_logits(self, rows: list[list[int]]) -> Tensor:
        """Compute the logits of the next token, (B, T, V), in float32; shorter rows are padded at their ends."""
        T = max(map(len, rows))
        tokens_BT = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=self._device)
        return self.model.compute_logits(
            Batch(
                tokens=tokens_BT,
                targets=tokens_BT,
                loss_mask=torch.ones_like(tokens_BT, dtype=torch.bool),
                position=torch.arange(T, device=self._device).expand_as(tokens_BT),
                sample=torch.zeros(len(rows), dtype=torch.int64, device=self._device),
            )
        ).float()
