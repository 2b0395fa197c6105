"""Names of namespaces and cgroups: they say which process made them, so that a later one can tell what is left over."""

import itertools
import os
import re
import select
from typing import NamedTuple, Self

from dynamix.collector.procfs.proc import Proc

_PATTERN = re.compile(r"dynamix-hosts-(\d+)-(\d+)-(\d+)")
_numbers = itertools.count()


class Name(NamedTuple):
    """Names everything of one set of hosts."""

    pid: int
    """The owner's process id."""
    start_ticks: int
    """The owner's start time in clock ticks since boot: tells it from a later process with its pid."""
    number: int
    """An owner may have several sets."""

    def __str__(self) -> str:
        return f"dynamix-hosts-{self.pid}-{self.start_ticks}-{self.number}"

    @classmethod
    def make(cls) -> Self:
        """A new name, owned by this process."""
        return cls(os.getpid(), Proc().stat(os.getpid()).start_ticks, next(_numbers))

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The name at the beginning of a namespace's or a cgroup's name; `None` for what is none of ours."""
        found = _PATTERN.match(text)
        return None if found is None else cls(*map(int, found.groups()))

    def has_living_owner(self) -> bool:
        """Whether the process that made it still runs. A dead one is in /proc until its parent looks."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            return not poll.poll(0) and Proc().stat(self.pid).start_ticks == self.start_ticks
        except FileNotFoundError:
            return False
        finally:
            os.close(process)
