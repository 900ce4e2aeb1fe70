"""The model of a run as lm-eval's `LM`: likelihoods of texts, and greedy answers.

B batch, T tokens, V vocabulary
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gangline import UserError
from gangline.strategy import Batch
from gangline.tools import Sampler

Asked = tuple[tuple[str, str], list[int], list[int]]  # texts, and tokens of context and continuation


def lm_of(run_dir: str, **options: Any) -> Any:
    """The model of a run as lm-eval's `LM`. options: as `RunModel` has them. Raises UserError as it does."""
    from lm_eval.api.model import TemplateLM

    return type("RunLM", (RunModel, TemplateLM), {})(run_dir, **options)


class RunModel:
    """What lm-eval's `TemplateLM` wants of a model, of the weights of a checkpoint, whole, in one process.

    Raises UserError where there are none, and for a run whose data is not text.
    """

    def __init__(self, run_dir: str, *, checkpoint: str | None = None, batch: int = 8) -> None:
        super().__init__()
        self.sampler = Sampler(run_dir, checkpoint=checkpoint)
        self.codec: Any = self.sampler.codec
        if self.codec.encode("a") is None:
            raise UserError(f"the data of {run_dir} is not text.", "Its model cannot be asked in words.")
        self.model = self.sampler.model.eval()
        self.max_length, self.batch = self.sampler.context, batch
        self._device = next(self.model.parameters()).device
        self.path: str | None = getattr(self.codec, "path", None)
        self._special = _special_of(self.path)

    # --- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """What ends a text: the tokenizer's own end, else what stands between files."""
        found = self._token("eos_token")
        found = getattr(self.codec, "separator", None) if found is None else found
        return 0 if found is None else found

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        found = self._token("bos_token")
        return self.eot_token_id if found is None else found

    def _token(self, name: str) -> int | None:
        word = self._special.get(name)
        return None if word is None else self.codec.tokenizer.token_to_id(word)

    @property
    def tokenizer_name(self) -> str:
        return str(self.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(self.codec.encode(string))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.sampler.template.render(chat_history, prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.sampler.template.source if chat_template else None

    # --- what lm-eval asks -------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: list[Asked], **_: Any) -> list[tuple[float, bool]]:
        """Of each continuation its log-likelihood, and whether it is what the model would have written.

        Raises UserError for one that is longer than what the model looks at, before anything is computed.
        """
        self._check_lengths(requests)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda n: -len(requests[n][1] + requests[n][2]))
        for start in range(0, len(order), self.batch):
            numbers = order[start : start + self.batch]
            asked = [((c + t)[-(self.max_length + 1) :], t) for _, c, t in (requests[n] for n in numbers)]
            logits_BTV = self._logits([tokens[:-1] for tokens, _ in asked])
            for number, (tokens, target), logits_TV in zip(numbers, asked, logits_BTV, strict=True):
                stop = len(tokens) - 1
                p_TV = logits_TV[stop - len(target) : stop].log_softmax(-1)
                wanted = torch.tensor(target, device=p_TV.device)
                greedy = bool((p_TV.argmax(-1) == wanted).all())
                found[number] = (float(p_TV.gather(-1, wanted[:, None]).sum()), greedy)
        return found

    def _check_lengths(self, requests: list[Asked]) -> None:
        for (_, text), _, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"the task asks how likely an answer of {len(continuation)} tokens is: {text!r:.60}.",
                    f"The model sees {self.max_length} tokens at a time.",
                    "Ask a task with shorter answers, or of a run with a longer batch.sequence_length.",
                )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each whole text, in windows of the context that the model was trained with."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            asked = [(("", ""), *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(asked)))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes, greedily. Raises UserError where a task wants it drawn."""
        return [self._answer(*request.args) for request in requests]

    def _answer(self, text: str, asked: dict[str, Any]) -> str:
        if asked.get("do_sample") and asked.get("temperature", 1.0) > 0:
            raise UserError("the task wants answers that are drawn.", "gangline eval writes the likeliest.")
        until = asked.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        most = min(int(asked.get("max_gen_toks", 256)), self.max_length - 1)
        row = self.tok_encode(text)[most - self.max_length :]  # not as text, which may come to more
        (answer,) = self.sampler.write([row or text], most, temperature=0.0, stop=list(filter(None, until)))
        return answer.text

    @torch.inference_mode()
    def _logits(self, rows: list[list[int]]) -> Tensor:
        """(B, T, V) of the next token, in float32; shorter rows are filled up behind their ends."""
        T = max(map(len, rows))
        tokens_BT = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=self._device)
        return self.model.logits(
            Batch(
                tokens=tokens_BT,
                targets=tokens_BT,
                loss_mask=torch.ones_like(tokens_BT, dtype=torch.bool),
                position=torch.arange(T, device=self._device).expand_as(tokens_BT),
                sample=torch.zeros(len(rows), dtype=torch.int64, device=self._device),
            )
        ).float()


def _special_of(tokenizer: str | None) -> dict[str, str]:
    """bos_token and eos_token of the tokenizer_config.json beside a tokenizer.json, where it has them."""
    beside = None if tokenizer is None else Path(tokenizer).expanduser().parent / "tokenizer_config.json"
    if beside is None or not beside.exists():
        return {}
    try:
        said = json.loads(beside.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{beside} cannot be read.", str(error)) from error
    if not isinstance(said, dict):
        raise UserError(f"{beside} cannot be read.", "It is no object with names and values.")
    words = {name: said.get(name) for name in ("bos_token", "eos_token")}
    words = {name: word.get("content") if isinstance(word, dict) else word for name, word in words.items()}
    return {name: word for name, word in words.items() if isinstance(word, str)}
