"""Control groups of the benchmark: one whose sockets are measured, one that stays empty."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PREFIX = "dynamix-bench-"
EMPTIES_WITHIN_S = 5.0


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
            _remove(old)
    top = mount / f"{PREFIX}{os.getpid()}"
    groups = Groups(top / "busy", top / "empty")
    for directory in (top, *groups):
        directory.mkdir()
    try:
        yield groups
    finally:
        _remove(top)


def join(group: Path) -> None:
    """Move this process there; its sockets belong to the group in which they were opened."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _remove(top: Path) -> None:
    """Processes that were waited for may take the kernel a moment longer."""
    deadline_s = time.monotonic() + EMPTIES_WITHIN_S
    for directory in (*(path for path in top.iterdir() if path.is_dir()), top):
        while True:
            try:
                directory.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)
