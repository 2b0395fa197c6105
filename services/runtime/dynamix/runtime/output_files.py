"""Files that a person names for output: what may be there already, and how one is written.

One policy for every command: regular files only. A path is checked before any work starts. It is refused, in one
sentence, when something else is there, when its directory is missing or may not be written, and when it is a file that
the program did not write. A file is written beside its place and renamed onto it: it is whole, or it is as it was.
"""

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 1 << 16
"""What is read of a file to tell its kind."""
WITHOUT_NAMELESS = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
"""What file systems say that know no files without a name, such as NFS: there a check is by permissions only."""


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


def check(path: Path, kind: FileKind | None = None, *, make_parents: bool = False) -> None:
    """Refuse a path that must not, or cannot, be written. Touches nothing.

    Args:
        path: as the person gave it.
        kind: what an existing file must be; an empty one is of every kind. `None`: any regular file may be replaced.
        make_parents: whether missing directories will be made.

    Raises:
        RefusedOutputError: with the reason.
    """
    if (named_in := Path(os.path.realpath(path.parent))) == Path("/dev") or named_in.is_relative_to("/proc"):
        raise RefusedOutputError(f"{path} is a device or an open file of a process: name a file")
    status = _status(path)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise RefusedOutputError(f"{path} is {noun_of(status)}: name a file")
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


def write(path: Path, content: bytes, *, mode: int | None = None, make_parents: bool = False) -> None:
    """Write a whole file, beside its place, and rename it onto that.

    The path is checked once more, as by `check`, since something else may be there by now. `mode` are the permissions;
    `None`: those of the file that is replaced, or what the umask leaves. Raises OSError when the file cannot be
    written; it is as it was.
    """
    check(path, make_parents=make_parents)
    if make_parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path.resolve(), content, mode)


@contextlib.contextmanager
def whole(path: Path, *, make_parents: bool = False) -> Iterator[io.BytesIO]:
    """A file to fill: what a `with` block puts into it is written to `path` when the block ends without an error."""
    file = io.BytesIO()
    yield file
    write(path, file.getvalue(), make_parents=make_parents)


def noun_of(status: os.stat_result) -> str:
    """What is there."""
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    devices = {stat.S_IFCHR: "a device", stat.S_IFBLK: "a block device"}
    return (kinds | devices)[stat.S_IFMT(status.st_mode)]


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
        check(path)
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
