"""Removes hosts: the processes that run there, their cgroups, links and namespaces; those of dead owners too.

Names of namespaces and cgroups say which process made them.
"""

import contextlib
import itertools
import os
import re
import select
import signal
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple, Self

from dynamix.collector.procfs.proc import Proc

from .cgroups import REMOVAL_PAUSE_S, REMOVAL_TIMEOUT_S, find_hierarchies, pids_below, remove_cgroup
from .host import INTERFACE
from .namespace import DIRECTORY, HostsError, Namespace

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
        return not self.wait_for_owner(timeout_ms=0)

    def wait_for_owner(self, *pipes: int, timeout_ms: int | None = None) -> bool:
        """Wait until its owner, or one of the pipes, has ended; whether that happened in time."""
        try:
            process = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if Proc().stat(self.pid).start_ticks != self.start_ticks:
                return True
            poll = select.poll()
            for descriptor in (process, *pipes):
                poll.register(descriptor, select.POLLIN | select.POLLHUP)
            return bool(poll.poll(timeout_ms))
        except FileNotFoundError:
            return True
        finally:
            os.close(process)


def remove(name: Name) -> None:
    """Remove everything of one set of hosts; what is gone already is no error.

    Raises:
        HostsError: naming what could not be removed.
    """
    namespaces = [Namespace(path.name) for path in _entries(DIRECTORY) if Name.parse(path.name) == name]
    directories = [path for root in find_hierarchies().roots if (path := root / str(name)).is_dir()]
    _end_processes(name, namespaces, directories)
    for directory in directories:
        remove_cgroup(directory)
    for namespace in namespaces:
        with contextlib.suppress(HostsError):  # the switch has none; a socket may keep a namespace, but no link
            namespace.ip("link", "delete", INTERFACE)
    for namespace in namespaces:
        namespace.remove()


def remove_stale_programs() -> None:
    """Remove all hosts whose owner and janitor both died."""
    entries = [path for place in (DIRECTORY, *find_hierarchies().roots) for path in _entries(place)]
    names = {name for path in entries if (name := Name.parse(path.name)) is not None}
    for name in sorted(names):
        if not name.has_living_owner():
            remove(name)


def _entries(directory: Path) -> list[Path]:
    """Sorted; nothing where there is no such directory, as before the first namespace."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _end_processes(name: Name, namespaces: Collection[Namespace], directories: Collection[Path]) -> None:
    """Kill until none is left: some may have been about to start others. The owner may be on the switch itself."""

    def running() -> set[int]:
        in_networks = {pid for namespace in namespaces for pid in namespace.pids()}
        return (pids_below(directories) | in_networks) - {name.pid, os.getpid()}

    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while pids := running():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise HostsError(f"{name}: processes {sorted(pids)} do not die: see their state in /proc/PID/status")
        time.sleep(REMOVAL_PAUSE_S)
