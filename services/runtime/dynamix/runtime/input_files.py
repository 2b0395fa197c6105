"""Files that a person names for input: regular ones only, since a FIFO may wait for ever and a device have no end."""

import errno
import stat
from pathlib import Path

from .output_files import noun_of


def check_regular(path: Path) -> None:
    """Refuse what is not a regular file, before it is opened.

    Raises:
        OSError: with the reason as `strerror`, as when it is opened; also where nothing is.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(code, f"it is {noun_of(status)}, not a regular file", str(path))


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises OSError as `check_regular`."""
    check_regular(path)
    return path.read_bytes()
