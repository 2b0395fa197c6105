"""Where a consumer stands in a stream, and where to start again after an interruption. No I/O."""

from typing import Literal

Start = Literal["new", "all", "last_per_subject"] | int
"""Where to begin: from now on, at the beginning, with each subject's last message, or at a sequence."""

NEW: Literal["new"] = "new"
ALL: Literal["all"] = "all"
LAST_PER_SUBJECT: Literal["last_per_subject"] = "last_per_subject"


class StreamPosition:
    """The last sequence handed out, and the start that was asked for as long as there is none.

    `NEW` is pinned to a sequence at the first opening, so that what is published while the first consumer is lost is
    read by the second. After an interruption `LAST_PER_SUBJECT` goes on with everything behind the last message read.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self.last = 0

    @property
    def needs_pin(self) -> bool:
        """Whether `pin` must be called before `policy`."""
        return self._start == NEW and not self.last

    def pin(self, last_sequence: int) -> None:
        """Fix what `NEW` means: everything behind `last_sequence`."""
        self._start = last_sequence + 1

    def accepts(self, sequence: int) -> bool:
        """Whether the message is a new one; if so it becomes the last."""
        if sequence <= self.last:
            return False
        self.last = sequence
        return True

    def policy(self) -> dict[str, str | int]:
        """The delivery policy of a consumer's configuration."""
        if self.last:
            return _by_sequence(self.last + 1)
        if isinstance(self._start, int):
            return _by_sequence(max(self._start, 1))
        return {"deliver_policy": self._start}


def _by_sequence(sequence: int) -> dict[str, str | int]:
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": sequence}
