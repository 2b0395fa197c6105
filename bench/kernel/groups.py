"""Control groups of the benchmark: one whose sockets are measured, one that stays empty."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.hosts.cgroups import remove_cgroup

PREFIX = "dynamix-bench-"


class Groups(NamedTuple):
    """Their directories."""

    busy: Path
    """The processes that send and receive."""
    empty: Path
    """No process ever."""


@contextlib.contextmanager
def made_groups(mount: Path) -> Iterator[Groups]:
    """Both, below the mount of version 2, with what killed benchmarks left removed; the processes must end before."""
    for old in mount.glob(f"{PREFIX}*"):
        if not Path("/proc", old.name.removeprefix(PREFIX)).exists():
            remove_cgroup(old)
    top = mount / f"{PREFIX}{os.getpid()}"
    groups = Groups(top / "busy", top / "empty")
    for directory in groups:
        directory.mkdir(parents=True)
    try:
        yield groups
    finally:
        remove_cgroup(top)


def join(group: Path) -> None:
    """Move this process there; its sockets belong to the group in which they were opened."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
