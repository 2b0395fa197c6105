"""Finds and removes programs that a dead collector left on a control group.

With links (Linux 5.7) the kernel does that by itself. Programs attached in the older way stay after kill -9 and cost
every packet for ever. A program is ours by its name, and left over when the process in its map `owner` is gone. Looking
at other processes' programs takes CAP_SYS_ADMIN, which kernels before 5.8 demand of a collector anyway.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamix.collector.procfs.proc import Proc

from . import syscall
from .attachment import KINDS, opened
from .program import INDEX, OWNER, PROGRAMS, Owner

_ENDED = ("Z", "X")
"""States of a process that is dead, whether or not its parent has taken notice."""


def remove_stale_programs(directory: Path, proc: Proc) -> int:
    """Detach what dead collectors left on a control group; how many programs that were.

    Raises:
        PermissionError: where programs are attached and this process may not look at them.
    """
    removed = 0
    with opened(directory) as group:
        for kind in KINDS:
            for identity in syscall.attached(group, kind):
                with _program(identity) as program:
                    if program is not None and _is_left_over(program, proc):
                        removed += _detached(program, group, kind)
    return removed


def this_owner(proc: Proc) -> Owner:
    """This process, as its programs shall name it."""
    pid = os.getpid()
    namespace = proc.pid_namespace(pid)
    return Owner(pid, proc.stat(pid).start_ticks, 0 if namespace is None else namespace)


def _is_left_over(program: int, proc: Proc) -> bool:
    info = syscall.program_info(program)
    if info.name not in PROGRAMS:
        return False
    owner = _owner(info.map_ids)
    return owner is not None and not _may_live(owner, proc)


def _may_live(owner: Owner, proc: Proc) -> bool:
    """Whether a process runs, or cannot be judged from here: another pid namespace counts in its own numbers."""
    if owner.pid_namespace != this_owner(proc).pid_namespace:
        return True
    try:
        stat = proc.stat(owner.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.start_ticks == owner.start_ticks and stat.state not in _ENDED


def _owner(map_ids: tuple[int, ...]) -> Owner | None:
    """What a program's map `owner` says; `None` before its collector has written it."""
    for identity in map_ids:
        table = syscall.open_map(identity)
        try:
            if syscall.map_name(table) != "owner":
                continue
            found = Owner(*syscall.BpfMap(table, INDEX, OWNER).look_up(0) or (0, 0, 0))
        finally:
            os.close(table)
        return found if found.pid else None
    return None


def _detached(program: int, group: int, kind: int) -> bool:
    """Detach; False where it is detached already, or a living link holds it."""
    try:
        syscall.detach(program, group, kind)
    except (FileNotFoundError, ValueError):
        return False
    return True


@contextmanager
def _program(identity: int) -> Iterator[int | None]:
    """A program's descriptor; `None` where it is gone by now."""
    try:
        descriptor = syscall.open_program(identity)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
