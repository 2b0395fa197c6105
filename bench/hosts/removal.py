"""Removes hosts: the processes that run there, their cgroups, links and namespaces; those of dead owners too."""

import contextlib
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

from .cgroups import REMOVAL_PAUSE_S, REMOVAL_TIMEOUT_S, find_hierarchies, pids_below, remove_cgroup
from .commands import HostsError
from .host import INTERFACE
from .names import Name
from .namespace import DIRECTORY, Namespace


def remove(name: Name) -> None:
    """Remove everything of one set of hosts; what is gone already is no error.

    Raises:
        HostsError: naming what could not be removed.
    """
    namespaces, directories = _namespaces(name), _directories(name)
    _end_processes(name, namespaces, directories)
    for directory in directories:
        remove_cgroup(directory)
    for namespace in namespaces:
        with contextlib.suppress(HostsError):  # the switch has none; a socket may keep a namespace, but no link
            namespace.ip("link", "delete", INTERFACE)
    for namespace in namespaces:
        namespace.remove()


def remove_stale_programs() -> list[Name]:
    """Remove all hosts whose owner and janitor both died; their names."""
    entries = [path for place in (DIRECTORY, *find_hierarchies().roots) for path in _entries(place)]
    names = {name for path in entries if (name := Name.parse(path.name)) is not None}
    dead = sorted(name for name in names if not name.has_living_owner())
    for name in dead:
        remove(name)
    return dead


def _namespaces(name: Name) -> list[Namespace]:
    return [Namespace(path.name) for path in _entries(DIRECTORY) if Name.parse(path.name) == name]


def _directories(name: Name) -> list[Path]:
    return [path for root in find_hierarchies().roots if (path := root / str(name)).is_dir()]


def _entries(directory: Path) -> list[Path]:
    """Sorted; nothing where there is no such directory, as before the first namespace."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _end_processes(name: Name, namespaces: Collection[Namespace], directories: Collection[Path]) -> None:
    """Kill until none is left: some may have been about to start others. The owner may be on the switch itself."""
    deadline = time.monotonic() + REMOVAL_TIMEOUT_S
    while pids := _running(namespaces, directories) - {name.pid, os.getpid()}:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise HostsError(f"{name}: processes {sorted(pids)} do not die: see their state in /proc/PID/status")
        time.sleep(REMOVAL_PAUSE_S)


def _running(namespaces: Collection[Namespace], directories: Collection[Path]) -> set[int]:
    in_networks = {pid for namespace in namespaces for pid in namespace.pids()}
    return pids_below(directories) | in_networks
