"""Files of a data set: found, unpacked and checked against their publisher's hash."""

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class MissingDataError(FileNotFoundError):
    """A data set is not there; the text says which file, where it was looked for and how to get it."""


class CorruptDataError(ValueError):
    """A file is there and is not what its publisher made."""


class PublishedFile(NamedTuple):
    """One file of a data set."""

    name: str
    md5: str
    """MD5 of the unpacked file."""


def places(directory: str | Path | None, usual: Sequence[Path]) -> tuple[Path, ...]:
    """Where to look: the usual places, or the directory given and those in it that are named as the usual ones."""
    if directory is None:
        return tuple(usual)
    return (Path(directory), *dict.fromkeys(Path(directory) / place.name for place in usual))


def read_published(file: PublishedFile, directories: Sequence[Path], title: str, how_to_get: str) -> bytes:
    """The unpacked content of a file, packed (.gz) or not, in the first of the directories that has it.

    Raises:
        MissingDataError: when none has it.
        CorruptDataError: when its hash is not its publisher's.
    """
    path = _find(file, directories)
    if path is None:
        looked = ", ".join(str(directory) for directory in directories)
        raise MissingDataError(f"{title} is missing: no {file.name} or {file.name}.gz in {looked}. {how_to_get}")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise CorruptDataError(f"{path} cannot be unpacked ({error}): fetch it again") from error
    check(content, file, path)
    return content


def check(content: bytes, file: PublishedFile, source: Path) -> None:
    """Raise CorruptDataError when the content, which came from `source`, is not the publisher's."""
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != file.md5:
        raise CorruptDataError(f"{source} has md5 {digest} unpacked, its publisher's has {file.md5}: fetch it again")


def _find(file: PublishedFile, directories: Sequence[Path]) -> Path | None:
    for directory in directories:
        for name in (f"{file.name}.gz", file.name):
            if (directory / name).is_file():
                return directory / name
    return None
