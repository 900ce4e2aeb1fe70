"""`gangline schema`: the JSON Schema of a run's configuration, for editors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from gangline.config.json_schema import run_schema


def main(argv: Sequence[str]) -> int:
    """Print the schema."""
    about = "Print the JSON Schema of config.yaml and of recipes, with every installed part."
    argparse.ArgumentParser(prog="gangline schema", description=about).parse_args(list(argv))
    print(json.dumps(run_schema(), ensure_ascii=False))
    return 0
