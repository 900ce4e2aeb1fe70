"""Layout of a pulse: words of 8 bytes in native byte order. Writer and reader share only this module.

0   head          one word per field, named below
32  phases        for each phase: total duration in ns, and number of times that the rank left the phase
72  histograms    for each phase: counts of durations, without the first steps of a start
.   groups        for each process group: number of collectives begun
.   record        newest collectives: a ring buffer of rows
.   names         text: for each group a line with the axis and the ranks
.   member        text: the callback or health check that core is calling, "" if none
"""

from __future__ import annotations

MAGIC = 0x676C7075_00000002  # "glpu", and the version of this layout

# Fields of the head. BEAT is odd while the words after it change, and larger after each change.
VERSION, PID, BORN, RANK, WORLD, GENERATION, BEAT, STEP, PHASE, UNDER, SINCE, ROW, RECORDED, NAMED = range(14)
HEAD = 32

# Phases of a rank. A step goes through data, forward and backward, optimizer, sync. "forward_backward": other work of
# the strategy's step; "collective": the wait for other ranks, in any phase; "between": all remaining work.
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
SPENT = HEAD  # two words per phase
COLUMNS = 256  # number of columns of a histogram: four per power of two of nanoseconds
HISTOGRAMS = SPENT + 2 * MOST_PHASES

# Rows of `StepRecord.rank_phases`: "other" is the sum of all phases that are not a row here.
ROWS = ("data", "forward", "backward", "optimizer", "collective", "checkpoint", "other")

OPERATIONS = ("", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "exchange", "barrier")
MOST_GROUPS = 64
GROUPS = HISTOGRAMS + MOST_PHASES * COLUMNS
RECORD = GROUPS + MOST_GROUPS
RECORDS = 128  # number of rows
CODE, SEQUENCE, BEGAN, BYTES, PEERS, DONE = range(6)  # words of a row; CODE = group * 16 + operation
ROW_WORDS = 6
NAMES = RECORD + RECORDS * ROW_WORDS
NAME_BYTES = 8192
MEMBER = NAMES + NAME_BYTES // 8
MEMBER_BYTES = 64
WORDS = MEMBER + MEMBER_BYTES // 8
MOST_PEERS = 62  # maximum number of peers in the bit mask of an exchange
UNKNOWN_PEERS = 1 << MOST_PEERS


def find_column(ns: int) -> int:
    """Return the histogram column of a duration of `ns` nanoseconds."""
    if ns < 4:
        return max(ns, 0)
    bits = ns.bit_length()
    return min(4 * (bits - 2) + ((ns >> (bits - 3)) & 3), COLUMNS - 1)


def compute_upper(number: int) -> int:
    """Return the upper bound of column `number` in ns (exclusive): from 4 on at most 1.25 times its lower bound."""
    if number < 4:
        return number + 1
    bits, part = divmod(number, 4)
    return (5 + part) << (bits - 1)
