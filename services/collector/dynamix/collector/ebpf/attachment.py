"""Programs on a control group: attached by links, which end with this process, or as before Linux 5.7.

Programs attached in the older way stay after kill -9 and cost every packet for ever: `remove_stale_programs`. A program
is ours by its name, and left over when the process in its map `owner` is gone. Looking at other processes' programs
takes CAP_SYS_ADMIN, which kernels before 5.8 demand of a collector anyway.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from dynamix.collector.procfs.proc import Proc

from . import syscall
from .program import INDEX, OWNER, PROGRAMS, Owner

KINDS = (syscall.INGRESS, syscall.SOCK_OPS)
"""Attachment points of `program.PROGRAMS`, in their order."""

_ESCAPED = re.compile(r"\\([0-7]{3})")
_ENDED = ("Z", "X")
"""States of a process that is dead, whether or not its parent has taken notice."""


def v2_mount(mountinfo: str) -> Path | None:
    """Mount point of the version 2 hierarchy, also beside version 1 (hybrid), by /proc/<pid>/mountinfo (proc(5))."""
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
    return None


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """A descriptor until the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def opened(directory: Path) -> AbstractContextManager[int]:
    """Descriptor of a control group's directory."""
    return closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


class Attachment:
    """Programs attached to a control group, until `close` or the end of this process.

    Args:
        directory: of a control group, version 2.
        programs: descriptors, in the order of `KINDS`; they stay the caller's.
        links: False attaches as before Linux 5.7. What a killed process attached so stays: see `remove_stale_programs`.
    """

    def __init__(self, directory: Path, programs: tuple[int, ...], *, links: bool = True) -> None:
        self._undo = ExitStack()
        self.by_links = links
        with ExitStack() as stack:
            group = self._undo.enter_context(opened(directory))
            stack.callback(self.close)  # whatever was attached before a failure
            for program, kind in zip(programs, KINDS, strict=True):
                self._attach(program, group, kind)
            stack.pop_all()

    def close(self) -> None:
        """Detach; a second call does nothing."""
        self._undo.close()

    def _attach(self, program: int, group: int, kind: int) -> None:
        if self.by_links:
            try:
                self._undo.callback(os.close, syscall.attach_link(program, group, kind))
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a kernel older than links (before 5.7)
                    raise
                self.by_links = False
        if not self.by_links:
            syscall.attach(program, group, kind)
            self._undo.callback(_detach, program, group, kind)


def _detach(program: int, group: int, kind: int) -> None:
    """A group that was removed meanwhile has taken its programs along."""
    with suppress(OSError):
        syscall.detach(program, group, kind)


def remove_stale_programs(directory: Path, proc: Proc) -> int:
    """Detach the programs of dead collectors and return their number. Raises PermissionError if it may not see them."""
    removed = 0
    with opened(directory) as group:
        for kind in KINDS:
            for identity in syscall.attached(group, kind):
                with suppress(FileNotFoundError), closing(syscall.open_program(identity)) as program:  # gone by now
                    if _is_left_over(program, proc):
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
    """Whether a process runs, or is in another pid namespace, where it cannot be checked."""
    if owner.pid_namespace != this_owner(proc).pid_namespace:
        return True
    try:
        stat = proc.stat(owner.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.start_ticks == owner.start_ticks and stat.state not in _ENDED


def _owner(map_ids: tuple[int, ...]) -> Owner | None:
    """Content of a program's map `owner`; `None` before its collector has written it."""
    for identity in map_ids:
        with closing(syscall.open_map(identity)) as table:
            if syscall.map_name(table) == "owner":
                found = Owner(*syscall.BpfMap(table, INDEX, OWNER).look_up(0) or (0, 0, 0))
                return found if found.pid else None
    return None


def _detached(program: int, group: int, kind: int) -> bool:
    """Detach; False where it is detached already, or a living link holds it."""
    try:
        syscall.detach(program, group, kind)
    except (FileNotFoundError, ValueError):
        return False
    return True
