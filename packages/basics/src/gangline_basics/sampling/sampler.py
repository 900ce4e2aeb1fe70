"""Text generation with the model of a run and the weights of a checkpoint, unsharded in one process."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.checkpoint.base import Checkpointer
from gangline.checkpoint.base_weights import BaseWeights
from gangline.checkpoint.id import CheckpointId
from gangline.comm.solo import Solo
from gangline.config.check import DEVICES
from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.plugin import registry
from gangline.run.directory import RunDirectory
from gangline.runtime import Sampling, Stop, Why, Written
from gangline.shard import MODEL, Layout, Registry, Shard, name_dtype, name_model_array
from gangline_basics.checkpoint.weights import find_weights_under
from gangline_basics.data.chat import TemplateRefusal, read_template
from gangline_basics.data.codec import TextCodec, TokenizerCodec
from gangline_basics.model.columns import lay_out_by_columns
from gangline_basics.model.packed import pack_weights
from gangline_basics.model.seams import list_recomputed
from gangline_basics.parallel.prepare import bind_folds
from gangline_basics.sampling.decode import decode
from gangline_basics.sampling.prompts import check_lengths
from gangline_basics.sampling.text import build_codec, cut_at_stop, decode_after, encode, find_ends, spell

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.data.vocabulary import RendersChats
    from gangline_basics.model.decoder import Decoder

USUAL = 200
# minimum number of tokens for which packed weights are used; packing takes as long as generating a few tokens
WORTH_PACKING = 16


@dataclass(frozen=True)
class Text:
    """Generated text after a prompt. tokens: tokens of `text`, and of the stop string that ended the text, if any."""

    prompt: str
    text: str
    tokens: list[int]
    why: Why


class Writer(ABC):
    """Text generation with the model and vocabulary of a run; subclasses define where the model runs.

    usual: default maximum number of tokens of a text, reduced to fit the context.
    """

    def __init__(self, run: Run, usual: int = USUAL) -> None:
        self.run, self.usual = run, usual
        self.codec = build_codec(run)
        self.ends = find_ends(run, self.codec)
        self.context = run.batch.sequence_length

    @abstractmethod
    def generate(self, starts: Sequence[Sequence[int]], sampling: Sampling, stop: Sequence[str] = ()) -> list[Written]:
        """Return the generated tokens for each row of tokens; a text ends when it contains one of `stop`."""

    def find_stop(self, stop: Sequence[str]) -> Stop | None:
        """Return a function that returns whether a text contains a stop string, or None without stop strings."""
        return (lambda written: any(word in spell(self.codec, written) for word in stop)) if stop else None

    @cached_property
    def template(self) -> RendersChats:
        """Chat template of the run's data, else the tokenizer's own. Raises UserError if there is none."""
        template = self.run.data.build_chat_template(self.run)
        if template is None and not isinstance(self.codec, TextCodec):
            raise UserError("the data source of this run has no known tokenizer, so its chat template is unknown.")
        return template or read_template(self.codec.path if isinstance(self.codec, TokenizerCodec) else None)

    def render_chat(self, messages: Sequence[dict[str, Any]]) -> str:
        """Return a conversation as text, up to the beginning of the answer, as in the run's data. Raises UserError."""
        try:
            return self.template.render(list(messages), prompt=True)
        except TemplateRefusal as error:
            raise UserError(f"the chat template {self.template.name} refuses the conversation.", str(error)) from error

    def write(
        self,
        prompts: Sequence[str | Sequence[int]],
        tokens: int | None = None,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        bos: bool = True,
    ) -> list[Text]:
        """Return the generated text for each prompt (text or tokens), independent of the content of other prompts.

        With a temperature above 0, a text depends on the index of its prompt.

        tokens  maximum number of new tokens; raises UserError if they exceed the context. None: `usual`, or as many as
                fit into the context
        stop    stop strings, which may contain special tokens; a text ends before the first stop string
        bos     whether to add the tokenizer's BOS; false for a rendered chat template, which contains a BOS

        Other arguments as in `Sampling`. Raises UserError if a prompt cannot be encoded, or is too long.
        """
        starts = [encode(self.codec, prompt, self.run, bos) for prompt in prompts]
        if tokens is None:
            tokens = max(1, min([self.usual, *(self.context - len(start) for start in starts)]))
        check_lengths(starts, tokens, self.context)
        sampling = Sampling(
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            ends=self.ends,
        )
        completions = self.generate(starts, sampling, stop)
        texts = []
        for prompt, start, one in zip(prompts, starts, completions, strict=True):
            kept_tokens, rest = cut_at_stop(self.codec, one.tokens, stop) if one.why == "stop" else (one.tokens, "")
            prompt_text = prompt if isinstance(prompt, str) else spell(self.codec, start)
            texts.append(Text(prompt_text, decode_after(self.codec, start, kept_tokens) + rest, one.tokens, one.why))
        return texts


class Sampler(Writer):
    """Writer with the model of a run on one device. Weights are loaded when the first text is generated.

    checkpoint  id of the checkpoint; None: the newest
    weights     prefix of the weights in the checkpoint: "model", or for example "callback/ema/0.999"
    device      device of the model; None: a GPU if there is one
    usual       as for `Writer`

    Raises UserError if there is no run or no checkpoint.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        checkpoint: str | None = None,
        weights: str = MODEL,
        device: str | None = None,
        usual: int = USUAL,
    ) -> None:
        run = RunDirectory.open(run_dir).run()
        self._kept: Checkpointer = registry.build(run.checkpoint, run, None)
        self._id = _choose(self._kept, run, checkpoint)
        self._weights, self._device = weights, device
        super().__init__(run, usual)

    @cached_property
    def model(self) -> Decoder:
        return load_model(self.run, self._kept, self._id, self._device, self._weights)

    @cached_property
    def recomputed(self) -> list[str]:
        """Paths of modules that prevent a KV cache, so that all tokens are recomputed; [] if the cache is used."""
        return list_recomputed(compose_model(self.run)[0])

    def generate(self, starts: Sequence[Sequence[int]], sampling: Sampling, stop: Sequence[str] = ()) -> list[Written]:
        return generate(self.model, starts, sampling, cached=not self.recomputed, stop=self.find_stop(stop))


def sample(run_dir: str | Path, prompt: str = "", tokens: int | None = None, **how: Any) -> str:
    """Return the prompt and the text that a run's model generates. how: options of `Sampler` and `Writer.write`."""
    options = {name: how.pop(name) for name in ("checkpoint", "weights", "device") if name in how}
    (text,) = Sampler(run_dir, **options).write([prompt], tokens, **how)
    return prompt + text.text


def load_model(
    run: Run, kept: Checkpointer, id: CheckpointId, device: str | None = None, weights: str = MODEL
) -> Decoder:
    """Load the run's model on one device, with the weights under the prefix `weights` of a checkpoint."""
    tree, plan = compose_model(run)
    model = construct(tree)
    bind_folds(model, plan, Solo)
    materialise(model, plan, device=_choose_device(device))
    whole = {name: tensor for name, tensor in model.state_dict().items() if plan.get_owner(name) == name}
    shapes = kept.read_shapes(id)
    arrays = find_weights_under(weights, shapes, whole)
    shards = [
        Shard(arrays.get(name, name_model_array(name)), tuple(tensor.shape), tensor.dtype, (0,) * tensor.dim(), tensor)
        for name, tensor in whole.items()
    ]
    record = kept.read_document(id).get("base", {})
    shards = BaseWeights(run, tree, plan).fill(shards, shapes, record, f"checkpoint {id}")
    layouts = {shard.name: Layout(shard.global_shape, name_dtype(shard.dtype)) for shard in shards}
    kept.load(id, shards, Registry.of(Mesh.of({}), layouts))
    lay_out_by_columns(model)
    return model


def _choose_device(name: str | torch.device | None) -> torch.device:
    """Return the device, by default a GPU if there is one. Raises UserError for a device that is not available."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    failure = None
    if re.fullmatch(DEVICES, str(name)):
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:  # torch raises either type for an unavailable device
            failure = error
    choices = ["cpu"] + [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    raise UserError(f"device {name} is not available.", f"Available devices: {', '.join(choices)}.") from failure


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    cached: bool = False,
    stop: Stop | None = None,
) -> list[Written]:
    """Return the tokens that an unsharded model on one device generates for each prompt (at least one token long).

    model: has `hidden(batch)` -> (B, T, D) and a `head` with `compute_logits(hidden)` -> (B, T, V).
    cached: as for `decode`.
    For several prompts on a CPU, memory meanwhile holds a second, packed copy of large float32 matrices.
    """
    was_training = model.training
    model.eval()

    def forward(batch: Batch) -> Tensor:
        return model.head.compute_logits(model.hidden(batch)[:, -1:])[:, -1]

    several = len(prompts) > 1 and cached and sampling.tokens >= WORTH_PACKING
    try:
        device = next(model.parameters()).device
        with pack_weights(model, len(prompts)) if several else nullcontext():
            return decode(forward, prompts, sampling, cached=cached, device=device, stop=stop)
    finally:
        model.train(was_training)


def _choose(kept: Checkpointer, run: Run, wanted: str | None) -> CheckpointId:
    ids = kept.list()
    if not ids:
        why = "A run saves every checkpoint.every steps, and at its end." if kept.keeps else "checkpoint=off."
        raise UserError(f"{run.job.dir} has no checkpoint to sample from.", why)
    if wanted is None:
        return kept.find_latest() or ids[-1]
    checkpoint_id = CheckpointId.parse(wanted)
    if checkpoint_id not in ids:
        raise UserError(
            f"checkpoint {wanted} does not exist in {run.job.dir}.",
            f"Existing checkpoints: {', '.join(map(str, ids))}. Without --checkpoint, the newest is used.",
        )
    return checkpoint_id
