"""Files that a person names for output: what may be there already, and how one is written.

One policy for every command. A path is checked before any work starts. It is refused, in one sentence, when it is a
directory, a block device or a socket, when its directory is missing or may not be written, and when it is a file that
the program did not write. A file is written beside its place and renamed onto it: it is whole, or it is as it was. A
character device or a FIFO (/dev/null, /dev/stdout, the shell's `>(...)`) is opened and written into, never renamed onto
and never removed; what grows line by line or is read again (results, captures, checkpoints) cannot be one.
"""

import contextlib
import errno
import fcntl
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 1 << 16
"""What is read of a file to tell its kind."""
WITHOUT_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""What file systems say that know no files without a name, such as NFS: there a check is by permissions only."""
MAX_LINKS = 40
"""Most links that are followed, as in the kernel."""


class RefusedOutputError(ValueError):
    """A path that is not written to; the text says what is there and what to do."""


class FileKind(NamedTuple):
    """What a command writes, and how to recognise a file of it."""

    noun: str
    recognises: Callable[[bytes], bool]
    """Told the first `HEAD_BYTES` of a file that is not empty."""


JSON = FileKind("a JSON file of this program", lambda head: head[:2] in (b"{\n", b"[\n", b"{}", b"[]"))
"""Indented; a file with a document per line, such as results, is none."""
PNG = FileKind("a PNG picture", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"))


def check(path: Path, kind: FileKind | None = None, *, streams: bool = True, make_parents: bool = False) -> None:
    """Refuse a path that must not, or cannot, be written. Touches nothing.

    Args:
        path: as the person gave it.
        kind: what an existing file must be; an empty one is of every kind. `None`: any regular file may be replaced.
        streams: whether a character device or a FIFO will do.
        make_parents: whether missing directories will be made.

    Raises:
        RefusedOutputError: with the reason.
    """
    descriptor = _own_descriptor(path)
    if descriptor is not None and streams:
        _check_descriptor(path, descriptor)
        return
    status = _status(path)
    if descriptor is not None or (status is not None and not _is_accepted(status, streams=streams)):
        raise RefusedOutputError(f"{path} is {noun_of(None if descriptor is not None else status)}: name a file")
    if status is not None and not stat.S_ISREG(status.st_mode):
        return
    _check_parent(path, make_parents=make_parents)
    if status is not None:
        _check_existing(path, kind)


def check_directory(path: Path) -> None:
    """Refuse a path that is no directory and cannot be made one, or may not be written; as `check`. Touches nothing."""
    status = _status(path)
    if status is None:
        _check_parent(path, make_parents=True)
    elif not stat.S_ISDIR(status.st_mode):
        raise RefusedOutputError(f"{path} is {noun_of(status)}: name a directory")
    else:
        _check_directory_takes_files(path, path)


def write(
    path: Path, content: bytes, *, mode: int | None = None, streams: bool = True, make_parents: bool = False
) -> None:
    """Write a whole file: into a device or a FIFO, otherwise beside its place and renamed onto it.

    The path is checked once more, as by `check`, since something else may be there by now. `mode` are the permissions;
    `None`: those of the file that is replaced, or what the umask leaves. Raises OSError when the file cannot be
    written; it is as it was.
    """
    check(path, streams=streams, make_parents=make_parents)
    if is_stream(path):
        _write_into(path, content)
        return
    if make_parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path.resolve(), content, mode)


@contextlib.contextmanager
def whole(path: Path, *, make_parents: bool = False) -> Iterator[io.BytesIO]:
    """A file to fill: what a `with` block puts into it is written to `path` when the block ends without an error."""
    file = io.BytesIO()
    yield file
    write(path, file.getvalue(), make_parents=make_parents)


def is_stream(path: Path) -> bool:
    """Whether it is written into: a character device, a FIFO, or an open file of this process such as /dev/stdout."""
    if _own_descriptor(path) is not None:
        return True
    status = _status(path)
    return status is not None and not stat.S_ISREG(status.st_mode) and _is_accepted(status, streams=True)


def _is_accepted(status: os.stat_result, *, streams: bool) -> bool:
    mode = status.st_mode
    return stat.S_ISREG(mode) or (streams and (stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)))


def noun_of(status: os.stat_result | None) -> str:
    """What is there; `None` stands for an open file of this process."""
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    devices = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a block device"}
    return (kinds | devices).get(stat.S_IFMT(status.st_mode) if status else 0, "an open file of this process")


def _status(path: Path) -> os.stat_result | None:
    """Status of what the path leads to; `None` where nothing is."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RefusedOutputError(f"{path} cannot be written: {error.strerror}; name another file") from error


def _check_parent(path: Path, *, make_parents: bool) -> None:
    directory = path.resolve().parent
    while make_parents and not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise RefusedOutputError(f"{path} cannot be written: there is no directory {directory}; make it first")
    _check_directory_takes_files(path, directory)


def _check_directory_takes_files(path: Path, directory: Path) -> None:
    """Check by permissions, and by a file without a name, since root may write everywhere, and in /proc nowhere."""
    if not os.access(directory, os.W_OK | os.X_OK):
        raise RefusedOutputError(f"{path} cannot be written: directory {directory} is closed to this user")
    try:
        os.close(os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o600))
    except OSError as error:
        if error.errno not in WITHOUT_NAMELESS or directory.is_relative_to("/proc") or directory.is_relative_to("/sys"):
            raise RefusedOutputError(
                f"{path} cannot be written: directory {directory} takes no files ({error.strerror}); name another place"
            ) from error


def _check_existing(path: Path, kind: FileKind | None) -> None:
    if not os.access(path, os.W_OK):
        raise RefusedOutputError(f"{path} may not be written by this user: name another file")
    if kind is None:
        return
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise RefusedOutputError(f"{path} cannot be read: {error.strerror}; name another file") from error
    if head and not kind.recognises(head):
        raise RefusedOutputError(f"{path} is not {kind.noun} and would be lost: name another file, or remove this one")


def _own_descriptor(path: Path) -> int | None:
    """The open file of this process that /dev/stdout, /dev/fd/63 and the like stand for.

    Opened by such a name, a file that the shell redirected to would be cut off and written from its beginning, and a
    rename would take it away from everyone who has it open. So it is written through the descriptor that is open.
    """
    for _ in range(MAX_LINKS):
        parent = os.path.realpath(path.parent)
        if parent == f"/proc/{os.getpid()}/fd" and path.name.isdecimal():
            return int(path.name)
        try:
            path = path.parent / path.readlink()
        except OSError:  # no link, or nothing there
            return None
    return None


def _check_descriptor(path: Path, descriptor: int) -> None:
    try:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    except OSError:
        raise RefusedOutputError(f"{path} is not open in this process: name a file") from None
    if flags & os.O_ACCMODE == os.O_RDONLY:
        raise RefusedOutputError(f"{path} is open for reading only: name a file")


def _write_into(path: Path, content: bytes) -> None:
    descriptor = _own_descriptor(path)
    if descriptor is None:
        opened = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        opened = os.dup(descriptor)
    with os.fdopen(opened, "wb") as file:
        file.write(content)


def _replace(path: Path, content: bytes, mode: int | None) -> None:
    """Write beside the place and rename; on the disk before that, so that a stop of the machine leaves one of both."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a killed process with the same number
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(opened, "wb") as file:
            if mode is None:
                _keep_owner_and_mode(path, opened)
            file.write(content)
            file.flush()
            os.fsync(opened)
        check(path, streams=False)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _keep_owner_and_mode(path: Path, opened: int) -> None:
    if (before := _status(path)) is None:
        return
    with contextlib.suppress(PermissionError):  # only root gives files away
        os.fchown(opened, before.st_uid, before.st_gid)
    os.fchmod(opened, stat.S_IMODE(before.st_mode))
