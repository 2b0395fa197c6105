"""Files that a person names for input: regular ones only, since a FIFO may wait for ever and a device have no end."""

import errno
import functools
import logging
import stat
from pathlib import Path

MAX_BYTES = 1 << 30


def check_regular(path: Path) -> None:
    """Refuse what is not a regular file, before it is opened.

    Raises:
        OSError: with the reason as `strerror`, as when it is opened; also where nothing is.
    """
    status = path.stat()
    place = path.resolve()
    if place.is_relative_to("/proc") or place.is_relative_to("/sys"):  # reading may fail, wait, or have no end
        raise OSError(errno.EINVAL, "not a regular file (a /proc or /sys entry)", str(path))
    if not stat.S_ISREG(status.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(code, "not a regular file", str(path))


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError as `check_regular`, and for one of more than `max_bytes`."""
    check_regular(path)
    if (num_bytes := path.stat().st_size) > max_bytes:
        raise OSError(errno.EFBIG, f"it has {num_bytes} bytes, more than {max_bytes}", str(path))
    return path.read_bytes()


def read_secret(path: Path, *, max_bytes: int = 64 * 1024) -> bytes:
    """The content of a file with a key or password, as `read_regular`; one warning when every user may read it."""
    content = read_regular(path, max_bytes=max_bytes)
    if path.stat().st_mode & stat.S_IROTH:
        _warn_of_open_file(path.resolve())
    return content


@functools.cache
def _warn_of_open_file(path: Path) -> None:
    logging.getLogger("dynamix").warning("%s may be read by every user of this machine: chmod 600 %s", path, path)
