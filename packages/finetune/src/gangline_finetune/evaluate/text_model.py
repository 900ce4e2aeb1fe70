"""Base class of models for lm-eval's `LM`: likelihoods of texts, and greedy generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gangline import UserError
from gangline_basics.data.codec import TextCodec
from gangline_basics.data.named_tokens import read_special_tokens
from gangline_basics.sampling.sampler import Writer

Asked = tuple[tuple[str, str], list[int], list[int]]  # ((context, continuation) texts, their tokens)


class AskedRow(NamedTuple):
    """Row of tokens to score.

    answer_length  number of tokens to score, at the end of the row
    greedy         whether the caller needs `is_greedy` (each answer token is the argmax); if false, that result is
                   undefined
    """

    tokens: list[int]
    answer_length: int
    greedy: bool


def make_lm_class(model: type[TextModel]) -> type[Any]:
    """Make a class that derives from `model` and from lm-eval's `TemplateLM`."""
    from lm_eval.api.model import TemplateLM

    return type(model.__name__, (model, TemplateLM), {})


class TextModel(ABC):
    """Model with the methods that lm-eval's `TemplateLM` requires.

    batch: batch size in rows. likelihoods_alone: names of tasks that need likelihoods, but not whether an answer is the
    likeliest. Raises UserError for a run whose data is not text.
    """

    def __init__(self, writer: Writer, batch: int, likelihoods_alone: Collection[str] = ()) -> None:
        super().__init__()
        self.writer, self.batch, self.likelihoods_alone = writer, batch, likelihoods_alone
        self.codec: Any = writer.codec
        if self.codec.encode("a") is None:
            raise UserError(f"the data of {writer.run.job.dir} is not text.", "lm-eval tasks require a model of text.")
        self.max_length = writer.context
        self.path: str | None = getattr(self.codec, "path", None)
        self._special = {} if self.path is None else read_special_tokens(Path(self.path).expanduser().parent)
        self._greedy: list[bool] | None = None  # `greedy` of each current request; None: no requests

    @abstractmethod
    def score_rows(self, rows: list[AskedRow]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether the tokens are the likeliest) of each row's last `answer_length` tokens."""

    # --- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """End-of-text token id: the tokenizer's EOS, else the separator of documents, else 0."""
        token_id = self._find_token("eos_token")
        token_id = getattr(self.codec, "separator", None) if token_id is None else token_id
        return 0 if token_id is None else token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without context: the tokenizer's BOS, else the end-of-text token."""
        token_id = self._find_token("bos_token")
        return self.eot_token_id if token_id is None else token_id

    def _find_token(self, name: str) -> int | None:
        word = self._special.get(name)
        return None if word is None else self.codec.tokenizer.token_to_id(word)

    @property
    def tokenizer_name(self) -> str:
        return str(self.path)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens as lm-eval's HFLM: with the tokenizer's special tokens, unless the text starts with BOS."""
        if not isinstance(self.codec, TextCodec):
            return list(self.codec.encode(string))
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.codec.decode_special([self.prefix_token_id]))
        before, own, after = self.codec.encode_special(string)
        return [*before, *own, *after] if add_special_tokens else own

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.writer.template.render(chat_history, prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self.writer.template.source if chat_template else None

    # --- requests of lm-eval -----------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihoods as `TemplateLM` does, after noting which requests need the likeliest answer."""
        self._greedy = [request.task_name not in self.likelihoods_alone for request in requests]
        return super().loglikelihood(requests, disable_tqdm)  # type: ignore[misc]

    def _loglikelihood_tokens(self, requests: list[Asked], **_: Any) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether greedy generation yields the continuation.

        Raises UserError for a continuation longer than the context, before anything is computed.
        """
        self._check_lengths(requests)
        flags = [True] * len(requests) if self._greedy is None else self._greedy
        limit = self.max_length + 1
        rows = [
            AskedRow((c + t)[-limit:], len(t), is_asked) for (_, c, t), is_asked in zip(requests, flags, strict=True)
        ]
        return self.score_rows(rows)

    def _check_lengths(self, requests: list[Asked]) -> None:
        for (_, text), _, continuation in requests:
            if len(continuation) > self.max_length:
                raise UserError(
                    f"the task scores an answer of {len(continuation)} tokens, which is too long: {text!r:.60}.",
                    f"The context length of the model is {self.max_length} tokens.",
                    "Choose a task with shorter answers, or a run with a longer batch.sequence_length.",
                )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, summed over windows of the model's context length."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        log_likelihoods = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            window_requests = [(("", ""), *make_disjoint_window(window)) for window in windows]
            self._greedy = [False] * len(window_requests)
            log_likelihoods.append(sum(value for value, _ in self._loglikelihood_tokens(window_requests)))
        return log_likelihoods

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate greedy answers. Raises UserError if a task requires sampling."""
        return [self._answer(*request.args) for request in requests]

    def get_max_answer_tokens(self, options: Mapping[str, Any]) -> int:
        """Return the maximum number of tokens of an answer.

        options: a task's `generation_kwargs`. Raises UserError for sampled or too long answers.
        """
        if options.get("do_sample") and options.get("temperature", 1.0) > 0:
            raise UserError(
                "the task requires sampled answers (do_sample).", "gangline eval supports only greedy answers."
            )
        most = int(options.get("max_gen_toks", 256))  # lm-eval's default
        if most >= self.max_length:  # refused by lm-eval's own models too: no token would be left for the question
            raise UserError(
                f"the task requires answers of up to {most} tokens from a model with context length {self.max_length}.",
                "Such an answer leaves no room for the question.",
                "Train with a longer batch.sequence_length, or set a smaller max_gen_toks in the task.",
            )
        return most

    def _answer(self, text: str, options: dict[str, Any]) -> str:
        most = self.get_max_answer_tokens(options)
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        row = self.tok_encode(text)[most - self.max_length :]  # as tokens, since re-encoded text may have more
        (answer,) = self.writer.write([row or text], most, temperature=0.0, stop=list(filter(None, until)))
        return answer.text
