"""Files for output: what may be replaced, and how one is written.

The path is checked before any work starts: only a regular file, in an existing directory that this user may write, and
no existing file that the program did not write itself. A file is written beside its place and renamed onto it: it is
whole, or it is as it was.
"""

import contextlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 1 << 16
"""Bytes of a file that are read to recognise its kind."""


class RefusedOutputError(ValueError):
    """A path that is not written to; the message names the reason and the fix."""


class FileKind(NamedTuple):
    """A kind of output file, and how to recognise one."""

    noun: str
    recognises: Callable[[bytes], bool]
    """Called with the first `HEAD_BYTES` of a file that is not empty."""


JSON = FileKind("a JSON file of this program", lambda head: head[:2] in (b"{\n", b"[\n", b"{}", b"[]"))
"""Indented; a file with a document per line, such as results, is not."""
PNG = FileKind("a PNG picture", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n"))


def check(path: Path, kind: FileKind | None = None, *, force: bool = False, make_parents: bool = False) -> None:
    """Refuse a path that must not, or cannot, be written, by RefusedOutputError with the reason. Touches nothing.

    `kind` is what an existing file must be, unless it is empty or `force` is given; `None`: any regular file may be
    replaced. `make_parents`: missing directories will be made.
    """
    exists = _exists(path, stat.S_ISREG, "a regular file: name a file")
    directory = path.resolve().parent
    while make_parents and not directory.exists():
        directory = directory.parent
    if not directory.is_dir():
        raise RefusedOutputError(f"{path} cannot be written: there is no directory {directory}; make it first")
    if not os.access(directory, os.W_OK | os.X_OK) or (exists and not os.access(path, os.W_OK)):
        raise RefusedOutputError(f"{path} cannot be written by this user: name another place")
    if exists and kind is not None and not force:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head and not kind.recognises(head):
            raise RefusedOutputError(f"{path} exists and is not {kind.noun}: name another file, or add --force")


def check_directory(path: Path) -> None:
    """Raise for a path that is no directory and cannot be made one, or is not writable. Changes nothing."""
    if _exists(path, stat.S_ISDIR, "a directory: name a directory"):
        path /= "file"
    check(path, make_parents=True)


def write(path: Path, content: bytes, *, mode: int | None = None, make_parents: bool = False) -> None:
    """Write a whole file, beside its place, and rename it onto that.

    The path is checked once more, since it may have changed since the start. `mode` are the permissions; `None`: those
    of the file that is replaced, or what the umask leaves. Raises OSError when the file cannot be written; it is as it
    was.
    """
    check(path, make_parents=make_parents)
    if make_parents:
        path.parent.mkdir(parents=True, exist_ok=True)
    path = path.resolve()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # of a killed process with the same number
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with os.fdopen(opened, "wb") as file:
            if mode is None and path.exists():
                before = path.stat()
                with contextlib.suppress(PermissionError):  # only root gives files away
                    os.fchown(opened, before.st_uid, before.st_gid)
                os.fchmod(opened, stat.S_IMODE(before.st_mode))
            file.write(content)
            file.flush()
            os.fsync(opened)  # before the rename, so that a stop of the machine leaves one of both
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def whole(path: Path) -> Iterator[io.BytesIO]:
    """A file to fill: what a `with` block puts into it is written to `path` when the block ends without an error."""
    file = io.BytesIO()
    yield file
    write(path, file.getvalue())


def _exists(path: Path, is_wanted: Callable[[int], bool], wanted: str) -> bool:
    """Whether the file exists. Raises RefusedOutputError if it is of another kind."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RefusedOutputError(f"{path} cannot be written: {error.strerror}; name another file") from error
    if not is_wanted(mode):
        raise RefusedOutputError(f"{path} is not {wanted}")
    return True
