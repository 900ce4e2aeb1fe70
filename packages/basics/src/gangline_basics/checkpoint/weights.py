"""Choice of the arrays of a checkpoint that are loaded as model weights: the run's own weights, or an EMA."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable

from gangline.errors import UserError
from gangline.shard import MODEL, name_model_array


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--weights` to the parser of a command that loads a model."""
    parser.add_argument(
        "--weights",
        default=MODEL,
        metavar="PREFIX",
        help="prefix of weights in the checkpoint, such as callback/ema/0.999 (default: the run's own weights)",
    )


def find_weights_under(prefix: str, stored: Collection[str], names: Iterable[str]) -> dict[str, str]:
    """Return {name: name of the stored array to load} for the model's parameters and buffers `names`.

    prefix: "model", or the prefix of other weights, such as "callback/ema/0.999". Frozen parameters and buffers have no
    array under such a prefix, so their arrays under "model" are loaded. Raises UserError if the checkpoint has no
    weights under the prefix, or lacks the array of a trained parameter. A parameter counts as trained if the checkpoint
    has optimizer state for it, under its name or, for stacked matrices, under `name.0` and so on.
    """
    prefix, names = prefix.strip("/"), list(names)
    arrays = {name: f"{prefix}/{name}" for name in names if f"{prefix}/{name}" in stored}
    if prefix == MODEL:
        return arrays
    if prefix not in list_prefixes(stored, names):
        others = ", ".join([MODEL, *list_prefixes(stored, names)])
        raise UserError(f"the checkpoint has no weights under {prefix}.", f"Weights in the checkpoint: {others}.")
    trained_names = {name.rpartition("/")[2] for name in stored if name.startswith("optimizer/")}
    trained_names |= {
        stack for name in trained_names for stack, _, number in [name.rpartition(".")] if number.isdecimal()
    }
    lacking = [name for name in names if name in trained_names and name not in arrays]
    if lacking:
        raise UserError(
            f"the weights under {prefix} in the checkpoint are incomplete: {lacking[0]} is missing.",
            f"{len(lacking)} trained parameters have no array under {prefix}.",
        )
    return {name: arrays.get(name, name_model_array(name)) for name in names}


def list_prefixes(stored: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the prefixes of weights other than the model's own, stored by callbacks and health checks."""
    known_names = set(names)
    parted = (name.rpartition("/") for name in stored if name.startswith(("callback/", "health/")))
    return sorted({place for place, _, name in parted if name in known_names})
