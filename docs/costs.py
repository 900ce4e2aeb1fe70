"""Write docs/costs.md: training costs by model size and cluster size. Takes some minutes.

python docs/costs.py
"""

from __future__ import annotations

from pathlib import Path

from gangline_basics.cluster.file import load_cluster
from gangline_planner.table import format_table, iterate_rows

PAGE = Path(__file__).parent / "costs.md"
CLUSTER = "h100_ib"
HEAD = """<!-- written by  python docs/costs.py  from the planner: change it there -->

# What training costs

This table is a first estimate for a budget. [Plan step time, memory and cost](how-to/what-will-it-cost.md) explains how
to compute these numbers for your own model, cluster and prices.

"""


def page() -> str:
    """Return the text of docs/costs.md."""
    cluster = load_cluster(CLUSTER)
    return HEAD + format_table(iterate_rows(cluster), cluster) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
