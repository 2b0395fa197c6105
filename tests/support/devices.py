"""A device of our own, for tests of what must not happen to one; nothing in /dev is ever named for output."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NULL = os.makedev(1, 3)


class Terminal(NamedTuple):
    """A character device that any user may make, and what reads what is written into it."""

    path: Path
    reader: int


def device_in(directory: Path) -> Path:
    """A null device where this user may make one, otherwise a FIFO."""
    path = directory / "device"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, NULL)
    except PermissionError:
        os.mkfifo(path)
    return path


def identity(path: Path) -> tuple[int, int, int]:
    """What a path itself is: its type, inode and device number; links are not followed."""
    status = path.lstat()
    return stat.S_IFMT(status.st_mode), status.st_ino, status.st_rdev


@contextmanager
def terminal() -> Iterator[Terminal]:
    """A pseudo-terminal."""
    reader, writer = os.openpty()
    try:
        yield Terminal(Path(os.ttyname(writer)), reader)
    finally:
        os.close(reader)
        os.close(writer)
