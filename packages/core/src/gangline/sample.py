"""Text from the model of a run: the weights of a checkpoint, whole, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gangline import plugins
from gangline.batch import Batch
from gangline.checkpoint.base import Checkpointer
from gangline.checkpoint.id import CheckpointId
from gangline.checkpoint.weights import weights_under
from gangline.comm.solo import Solo
from gangline.errors import UserError
from gangline.mesh import Mesh
from gangline.model.build import construct, materialise
from gangline.model.compose import compose_model
from gangline.parallel.prepare import bind_folds
from gangline.rundir import RunDirectory
from gangline.shard import MODEL, Layout, Registry, Shard, model_array

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline.data.vocabulary import Codec
    from gangline.model.decoder import Decoder


def sample(
    run_dir: str | Path,
    prompt: str = "",
    tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    checkpoint: str | None = None,
    weights: str = MODEL,
    device: str | None = None,
) -> str:
    """The prompt and `tokens` more tokens, as text, from a checkpoint of the run (by default the newest).

    weights: those under another prefix than the model's own, such as "callback/ema/0.999".
    Raises UserError where there is no run or no checkpoint, or where the prompt cannot be put in tokens.
    """
    run = RunDirectory.open(run_dir).run()
    kept: Checkpointer = plugins.build(run.checkpoint, run, None)
    id = _choose(kept, run, checkpoint)
    codec = _codec(run)
    start = _encode(codec, prompt, run)
    model = load_model(run, kept, id, device, weights)
    written = generate(model, start, tokens, temperature, seed, run.batch.sequence_length, top_k)
    text = codec.decode(written)
    assert text is not None, "a codec that encodes also decodes"
    return prompt + text


def load_model(
    run: Run, kept: Checkpointer, id: CheckpointId, device: str | None = None, weights: str = MODEL
) -> Decoder:
    """The run's model on one device, with the master weights of a checkpoint or others that it holds (`weights`)."""
    tree, plan = compose_model(run)
    model = construct(tree)
    bind_folds(model, plan, Solo)
    materialise(model, plan, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    whole = {name: tensor for name, tensor in model.state_dict().items() if plan.owner(name) == name}
    arrays = weights_under(weights, kept.arrays(id), whole)
    shards = [
        Shard(arrays.get(name, model_array(name)), tuple(tensor.shape), tensor.dtype, (0,) * tensor.dim(), tensor)
        for name, tensor in whole.items()
    ]
    layouts = {shard.name: Layout(shard.global_shape, str(shard.dtype).removeprefix("torch.")) for shard in shards}
    kept.load(id, shards, Registry.of(Mesh.of({}), layouts))
    return model


@torch.inference_mode()
def generate(
    model: Decoder,
    tokens: list[int],
    count: int,
    temperature: float,
    seed: int,
    context: int,
    top_k: int | None = None,
) -> list[int]:
    """`count` tokens that the model writes after `tokens` (at least one), seeing `context` of them at most.

    model: has `hidden(batch)` -> (B, T, D) and a `head` with `logits(hidden)` -> (B, T, V). Each token is drawn from
    softmax(logits / temperature), of the `top_k` likeliest where that is given; temperature 0 takes the likeliest.
    The same seed writes the same text.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    row = list(tokens)
    for _ in range(count):
        batch = _batch(torch.tensor([row[-context:]], device=device))
        hidden_BTD = model.hidden(batch)
        logits_V = model.head.logits(hidden_BTD[:, -1:])[0, -1].double().cpu()
        row.append(_draw(logits_V, temperature, top_k, generator))
    model.train(was_training)
    return row[len(tokens) :]


def _draw(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def _batch(tokens_BT: Tensor) -> Batch:
    return Batch(
        tokens=tokens_BT,
        targets=tokens_BT,  # nobody asks for a loss here
        loss_mask=torch.ones_like(tokens_BT, dtype=torch.bool),
        position=torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT),
        sample=torch.zeros(len(tokens_BT), dtype=torch.int64, device=tokens_BT.device),
    )


def _choose(kept: Checkpointer, run: Run, wanted: str | None) -> CheckpointId:
    held = kept.list()
    if not held:
        why = "A run saves at its end, and before that as checkpoint.every says." if kept.keeps else "checkpoint=off."
        raise UserError(f"{run.run.dir} has no checkpoint to sample from.", why)
    if wanted is None:
        return kept.latest() or held[-1]
    found = CheckpointId.parse(wanted)
    if found not in held:
        raise UserError(
            f"{run.run.dir} has no checkpoint {wanted}.",
            f"It has {', '.join(map(str, held))}; without --checkpoint the newest.",
        )
    return found


def _codec(run: Run) -> Codec:
    return run.data.codec() or plugins.build(run.data, run, "train")


def _encode(codec: Codec, prompt: str, run: Run) -> list[int]:
    """The prompt's tokens; of an empty one those of a line's end, so that there is something to go on from."""
    tokens = codec.encode(prompt or "\n")
    if tokens is None:
        raise UserError("the data of this run is not text, so there is nothing to sample.")
    if not tokens:
        raise UserError(f"the prompt {prompt!r} has no token in this run's vocabulary.", "Try another --prompt.")
    beyond = max(tokens)
    if beyond >= run.model.vocab_size:
        raise UserError(
            f"the prompt {prompt!r} has token {beyond}, and the model knows {run.model.vocab_size}.",
            "data.tokenizer may have changed since the run.",
        )
    return tokens
