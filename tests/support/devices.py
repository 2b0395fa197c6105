"""A device of our own, for tests of what must not happen to one; nothing in /dev is ever named for output."""

import os
import stat
from pathlib import Path

NULL = os.makedev(1, 3)


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
