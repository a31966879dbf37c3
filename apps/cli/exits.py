"""Exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the exit code says."""

    DONE = 0  # done, or a positive verdict (owned)
    NEGATIVE = 1  # a negative verdict (not owned), or a mark that does not read back from the saved file
    BAD_INPUT = 2  # usage or bad input; stdout is empty
    UNDECIDED = 3  # could not decide (inconclusive)
    INTERNAL = 4  # a fault of DeepSeal's own
    INTERRUPTED = 130


VERDICT_EXIT = {"owned": Exit.DONE, "not-owned": Exit.NEGATIVE, "inconclusive": Exit.UNDECIDED}
