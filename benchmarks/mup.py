"""Measure whether the best learning rate stays the same for wider models, with and without mup=on.

    python benchmarks/mup.py --widths 32 64 128 256 --steps 100

Prints the mean loss of the last fifth of the steps, by width and learning rate; * marks the best of a row. Expected
(arXiv 2203.03466, figure 1): with mup all stars are in the same column, without mup they move to lower learning rates.
Wider models have more heads of the same width. The learning rate is constant from the first step: warm-up and decay
tolerate learning rates that are too high for a width, and would hide the difference in a short run.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from pathlib import Path

from gangline_testkit.sessions import read_lines, train_session

LINEARS = (
    "attention.wq", "attention.wk", "attention.wv", "attention.wo",
    "feed_forward.w_gate", "feed_forward.w_up", "feed_forward.w_down",
)  # fmt: skip
RUN = (
    "data=text", "model.vocab_size=256", "model.layers=2", "batch.global_size=8", "batch.micro_size=8",
    "batch.sequence_length=64", "precision=fp32", "optimizer.weight_decay=0", "checkpoint=off", "validate.every=null",
    "run.deterministic=false", "schedule=constant", "schedule.warmup_steps=0",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument(
        "--powers",
        type=int,
        nargs="+",
        default=[-12, -11, -10, -9, -8, -7, -6, -5],
        help="learning rates as powers of two",
    )
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    for mup in (True, False):
        print(f"mup={'on' if mup else 'off'}\n  width  " + "  ".join(f"2^{power:<6}" for power in options.powers))
        best = []
        for width in options.widths:
            losses = [loss(width, power, options, mup) for power in options.powers]
            least = min(losses)
            best.append(options.powers[losses.index(least)])
            shown = "  ".join(f"{value:.4f}{'*' if value == least else ' '} " for value in losses)
            print(f"  {width:>5}  {shown}", flush=True)
        doublings = math.log2(options.widths[-1] / options.widths[0])
        print(f"  the best power moves by {best[-1] - best[0]} over {doublings:g} doublings of the width")


def loss(width: int, power: int, options: argparse.Namespace, mup: bool) -> float:
    """Return the mean loss of the last fifth of the steps with this width and learning rate; infinite if not finite."""
    words = [f"model.dim={width}", f"model.heads={width // 16}", f"model.kv_heads={width // 16}"]
    words += [f"model.ffn_dim={2 * width}", f"optimizer.learning_rate={2.0**power}", f"run.steps={options.steps}"]
    if mup:
        base = options.widths[0]
        rates = ", ".join(f"blocks.*.{name}: {base / width}" for name in LINEARS)
        words += ["mup=on", f"mup.base_dim={base}", f"optimizer.lr_multipliers={{{rates}}}"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        if train_session(run, *RUN, *words) != 0:
            return math.inf
        late = [float(record["loss"]) for record in read_lines(run, "metrics.jsonl")[-options.steps // 5 :]]
    mean = sum(late) / len(late)
    return mean if math.isfinite(mean) else math.inf


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
