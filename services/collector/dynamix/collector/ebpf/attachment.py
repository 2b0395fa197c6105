"""Programs on a control group: attached by links, which end with this process, or as before Linux 5.7."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from . import syscall

KINDS = (syscall.INGRESS, syscall.SOCK_OPS)
"""Where `program.PROGRAMS` are attached, in their order."""


_ESCAPED = re.compile(r"\\([0-7]{3})")


def v2_mount(mountinfo: str) -> Path | None:
    """Mount point of the version 2 hierarchy, also beside version 1 (hybrid), by /proc/<pid>/mountinfo (proc(5))."""
    for line in mountinfo.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            return Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields.split()[4]))
    return None


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Descriptor of a control group's directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Attachment:
    """Programs attached to a control group, until `close` or the end of this process.

    Args:
        directory: of a control group, version 2.
        programs: descriptors, in the order of `KINDS`; they stay the caller's.
        links: False attaches as before Linux 5.7. What a killed process attached so stays: see `stale_programs`.
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
                if not syscall.says_no_links(error):
                    raise
                self.by_links = False
        if not self.by_links:
            syscall.attach(program, group, kind)
            self._undo.callback(_detach, program, group, kind)


def _detach(program: int, group: int, kind: int) -> None:
    """A group that was removed meanwhile has taken its programs along."""
    with suppress(OSError):
        syscall.detach(program, group, kind)
