"""`gangline sample RUN_DIR`: write text with the model of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gangline.checkpoint.weights import add_weights


def main(argv: Sequence[str]) -> int:
    """Print the prompt and what the model writes after it."""
    parser = argparse.ArgumentParser(prog="gangline sample", description="Write text with the model of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's directory")
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--tokens", type=_at_least(0, int), default=200, help="how many to write (%(default)s)")
    parser.add_argument("--temperature", type=_at_least(0.0, float), default=0.8, help="0: the likeliest (%(default)s)")
    parser.add_argument("--top-k", type=_at_least(1, int), help="draw from this many of the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="another seed writes another text (%(default)s)")
    parser.add_argument("--checkpoint", metavar="ID", help="such as step-00000100; by default the newest")
    add_weights(parser)
    parser.add_argument("--device", help="by default a GPU where there is one")
    options = parser.parse_args(list(argv))

    from gangline.sample import sample

    print(
        sample(
            options.run_dir,
            options.prompt,
            options.tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            seed=options.seed,
            checkpoint=options.checkpoint,
            weights=options.weights,
            device=options.device,
        )
    )
    return 0


def _at_least(least: float, kind: type):
    def parse(text: str) -> float:
        value = kind(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    parse.__name__ = kind.__name__  # argparse names it in its message
    return parse
