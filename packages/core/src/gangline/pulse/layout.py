"""Layout of a pulse: words of 8 bytes, in the machine's own order. Writer and reader share this alone.

0   head          one word each, the names below
32  phases        for each phase its duration in ns, and how often it was left
72  histograms    for each phase, counts of its durations, without the first steps of a start
.   groups        for each process group, number of collectives begun
.   record        the newest collectives: a ring of rows
.   names         text: for each group a line with the axis and its ranks
.   member        text: the callback or health check that core has called, "" if none
"""

from __future__ import annotations

MAGIC = 0x676C7075_00000002  # "glpu", and the version of this layout

# The head. BEAT is odd while the words below it change, and has another value after each change.
VERSION, PID, BORN, RANK, WORLD, GENERATION, BEAT, STEP, PHASE, UNDER, SINCE, ROW, RECORDED, NAMED = range(14)
HEAD = 32

# Phases of a rank. A step goes through data, forward and backward, optimizer, sync; "forward_backward" is the
# strategy's work in between, "collective" the wait for other ranks in any phase, "between" all other work.
PHASES = (
    "start",
    "build",
    "restore",
    "between",
    "data",
    "forward_backward",
    "forward",
    "backward",
    "optimizer",
    "collective",
    "sync",
    "callback",
    "validate",
    "save",
    "checkpoint",
    "recovery",
    "end",
)
NUMBER = {name: number for number, name in enumerate(PHASES)}
MOST_PHASES = 20
SPENT = HEAD  # two words a phase
COLUMNS = 256  # columns of a histogram: four for each power of two of nanoseconds
HISTOGRAMS = SPENT + 2 * MOST_PHASES

# Times of each rank in the step record: "other" is the sum of phases without a row of their own.
ROWS = ("data", "forward", "backward", "optimizer", "collective", "checkpoint", "other")

OPERATIONS = ("", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange", "barrier")
MOST_GROUPS = 64
GROUPS = HISTOGRAMS + MOST_PHASES * COLUMNS
RECORD = GROUPS + MOST_GROUPS
RECORDS = 128  # rows
CODE, SEQUENCE, BEGAN, BYTES, PEERS, DONE = range(6)  # the words of a row; CODE = group * 16 + operation
ROW_WORDS = 6
NAMES = RECORD + RECORDS * ROW_WORDS
NAME_BYTES = 8192
MEMBER = NAMES + NAME_BYTES // 8
MEMBER_BYTES = 64
WORDS = MEMBER + MEMBER_BYTES // 8
MOST_PEERS = 62  # maximum number of peers that a row of an exchange names, a bit each
UNKNOWN_PEERS = 1 << MOST_PEERS


def find_column(ns: int) -> int:
    """Return the histogram column of a duration of `ns` nanoseconds."""
    if ns < 4:
        return max(ns, 0)
    bits = ns.bit_length()
    return min(4 * (bits - 2) + ((ns >> (bits - 3)) & 3), COLUMNS - 1)


def compute_upper(number: int) -> int:
    """Return the smallest duration in ns above column `number`; from 4 on at most 1.25 times the smallest within it."""
    if number < 4:
        return number + 1
    bits, part = divmod(number, 4)
    return (5 + part) << (bits - 1)
