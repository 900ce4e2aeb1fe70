"""`gangline sample RUN_DIR`: generate text with the model of a run."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence

from gangline.errors import UserError
from gangline_basics.checkpoint.weights import add_weights


def main(argv: Sequence[str]) -> int:
    """Print each prompt and the generated text. Raises UserError for arguments that do not fit together."""
    parser = argparse.ArgumentParser(prog="gangline sample", description="Generate text with the model of a run.")
    _add_arguments(parser)
    options = parser.parse_args(list(argv))

    from gangline_basics.sampling.prompts import read_prompts
    from gangline_basics.sampling.sampler import Sampler

    sampler = Sampler(options.run_dir, checkpoint=options.checkpoint, weights=options.weights, device=options.device)
    prompts = [*options.prompt, *(read_prompts(options.prompts) if options.prompts else ())] or [""]
    texts = []
    for number, prompt in enumerate(prompts, 1):
        if options.chat:
            texts.append(
                sampler.render_chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            )
        elif isinstance(prompt, str):
            texts.append(prompt)
        else:
            raise UserError(
                f"prompt {number} is a conversation.", "Without --chat, each prompt must be a text.", "--chat"
            )
    for what in sampler.recomputed[:1]:
        print(
            f"gangline sample: {what} does not support a KV cache, so all tokens are recomputed for each new token.",
            file=sys.stderr,
        )
    completions = sampler.write(
        texts,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
        bos=not options.chat,  # a chat template writes its own BOS
    )
    for number, text in enumerate(completions):
        if options.json:
            print(json.dumps({"prompt": text.prompt, "text": text.text, "tokens": text.tokens, "why": text.why}))
            continue
        if number:
            print("---")
        print(text.text if options.chat else text.prompt + text.text)
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory")
    parser.add_argument("--prompt", action="append", default=[], help="beginning of a generated text; may be repeated")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='file of prompts, one per line; .jsonl: "...", {"prompt": ...}, {"messages": [{"role", "content"}, ...]}',
    )
    parser.add_argument(
        "--chat", action="store_true", help="render each prompt as a user message by the tokenizer's chat template"
    )
    usual = "maximum number of new tokens (default: 200, reduced to fit batch.sequence_length)"
    parser.add_argument("--tokens", type=_require_least(0, int), help=usual)
    parser.add_argument(
        "--temperature",
        type=_require_least(0.0, float),
        default=0.8,
        help="sampling temperature; 0: the likeliest token (default: %(default)s)",
    )
    parser.add_argument("--top-k", type=_require_least(1, int), help="number of likeliest tokens to sample from")
    parser.add_argument(
        "--top-p", type=_share, metavar="P", help="total probability of the likeliest tokens to sample from"
    )
    parser.add_argument(
        "--stop",
        type=_parse_word,
        action="append",
        default=[],
        metavar="TEXT",
        help="stop string, before which a text ends; may be repeated",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random numbers for sampling (default: %(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a line of JSON for each prompt: prompt, text, tokens, why"
    )
    parser.add_argument("--checkpoint", metavar="ID", help="checkpoint id, such as step-00000100 (default: the newest)")
    add_weights(parser)
    parser.add_argument("--device", help="device of the model (default: a GPU if available)")


def _require_least(least: float, kind: type):
    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least {least}")
        return value

    parse.__name__ = kind.__name__  # argparse prints the name of the type in error messages
    return parse


def _parse_word(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a stop string must not be empty")
    return text


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value
