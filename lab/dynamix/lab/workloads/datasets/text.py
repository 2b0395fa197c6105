"""Plain text as data: the bytes of the UTF-8 files in a directory. None is shipped; any text will do."""

from pathlib import Path

import torch

from .files import CorruptDataError, MissingDataError, places

TEXT_DIRECTORIES = (Path(".data/text"),)


def read_text(directory: str | Path | None = None) -> torch.Tensor:
    """Bytes of all *.txt files of a directory, uint8, one after the other in the order of their names.

    Args:
        directory: where the files are, or the directory above; the usual place when not given.

    Raises:
        MissingDataError: when there is no such file.
        CorruptDataError: when a file is not UTF-8: it is no text then, or the encoding is one to convert from first.
    """
    directories = places(directory, TEXT_DIRECTORIES)
    files = next((found for place in directories if (found := sorted(place.glob("*.txt")))), None)
    if files is None:
        looked = ", ".join(str(place) for place in directories)
        raise MissingDataError(
            f"no text to learn from: no *.txt in {looked}. Put any UTF-8 text of a megabyte or more there, for example "
            "a novel from https://www.gutenberg.org, or name a directory that has one."
        )
    return torch.frombuffer(bytearray(b"".join(_read(file) for file in files)), dtype=torch.uint8)


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{path} is not UTF-8 ({error}): convert it, for example with iconv") from error
    return content
