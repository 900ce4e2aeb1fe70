"""The pulse of a rank: where it is, in shared memory of its machine, for whoever watches from outside. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.pulse.layout import OPERATIONS as OPERATIONS, PHASES as PHASES, ROWS as ROWS, upper as upper
    from gangline.pulse.memory import remove as remove, sweep as sweep
    from gangline.pulse.read import (
        Collective as Collective,
        PulseReader as PulseReader,
        Seen as Seen,
        find as find,
        readers as readers,
    )
    from gangline.pulse.write import Pulse as Pulse, current as current, use as use

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.pulse.layout": "OPERATIONS PHASES ROWS upper",
        "gangline.pulse.memory": "remove sweep",
        "gangline.pulse.read": "Collective PulseReader Seen find readers",
        "gangline.pulse.write": "Pulse current use",
    },
)
