"""Compare published measurements with the planner's predictions, row by row and table by table.

python benchmarks/published ROWS.json [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gangline.cli import run_guarded

# Python puts this folder on the path, and the package needs its parent
sys.path[0] = str(Path(__file__).resolve().parent.parent)


def main(argv: Sequence[str]) -> int:
    """Print the report of a file of measurements. Raises UserError for a file without rows."""
    from published.report import as_data, as_text, judge, read_rows

    parser = argparse.ArgumentParser(prog="python benchmarks/published", description=__doc__.partition("\n")[0])
    parser.add_argument("rows", help="JSON file: a list of measurements, or an object with such a list as `rows`")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(argv)
    report = judge(read_rows(options.rows))
    print(json.dumps(as_data(report), indent=1) if options.json else as_text(report))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded("benchmarks/published", main, sys.argv[1:]))
