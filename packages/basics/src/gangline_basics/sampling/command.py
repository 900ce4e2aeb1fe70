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
    parser = argparse.ArgumentParser(prog="gangline sample", description="Write text with the model of a run.")
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
            raise UserError(f"prompt {number} is a conversation.", "A chat template makes a text of it.", "--chat")
    for what in sampler.recomputed[:1]:
        print(
            f"gangline sample: {what} does not say how it takes one more token, so all are computed again.",
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
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's directory")
    parser.add_argument("--prompt", action="append", default=[], help="what a text begins with; give it several times")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='a prompt a line; of a .jsonl "...", {"prompt": "..."} or {"messages": [{"role", "content"}, ...]} a line',
    )
    parser.add_argument(
        "--chat", action="store_true", help="a prompt is what a user says: put it in the tokenizer's chat template"
    )
    usual = "how many to write at most (200, or what batch.sequence_length has room for)"
    parser.add_argument("--tokens", type=_require_least(0, int), help=usual)
    parser.add_argument(
        "--temperature", type=_require_least(0.0, float), default=0.8, help="0: the likeliest (%(default)s)"
    )
    parser.add_argument("--top-k", type=_require_least(1, int), help="draw from this many of the likeliest")
    parser.add_argument(
        "--top-p", type=_share, metavar="P", help="draw from the likeliest that together have this probability"
    )
    parser.add_argument(
        "--stop",
        type=_parse_word,
        action="append",
        default=[],
        metavar="TEXT",
        help="a text ends before this; give it several times",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed writes another text (%(default)s)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each prompt: prompt, text, tokens, why")
    parser.add_argument("--checkpoint", metavar="ID", help="such as step-00000100; by default the newest")
    add_weights(parser)
    parser.add_argument("--device", help="by default a GPU where there is one")


def _require_least(least: float, kind: type):
    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least {least}")
        return value

    parse.__name__ = kind.__name__  # argparse prints it in its message
    return parse


def _parse_word(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the empty text is before every token")
    return text


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value
