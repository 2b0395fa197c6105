"""Arguments of several commands; and their output: where it may go, checked as they are read, and tables as JSON."""

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.output_files import JSON, PNG, FileKind, RefusedOutputError

from .errors import CommandError

STANDARD_OUTPUT = "-"
Document = dict[str, Any]
"""An object of JSON."""

POLICY = FileKind("a learned policy", lambda head: head[8:9] == b"{" and b'"dynamix"' in head)
SCENARIO = FileKind("a scenario", lambda head: re.search(rb"^workload\s*=", head, re.MULTILINE) is not None)
TUNED = FileKind("a file of `dynamix tune`", lambda head: b"\ncommand = " in head and b"\nnum_settings = " in head)


class OutputPath(str):
    """An argument that names a file to write, checked."""

    __slots__ = ()


def output_path(kind: FileKind | None, *, make_parents: bool = False) -> Callable[[str], OutputPath]:
    """An argument's type: the path of a file to write; an unfit one is an error of usage. See `output_files.check`."""

    def checked(text: str) -> OutputPath:
        if text == STANDARD_OUTPUT:
            raise argparse.ArgumentTypeError("'-' does not stand for standard output here: name a file")
        try:
            output_files.check(Path(text), kind, make_parents=make_parents)
        except RefusedOutputError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return OutputPath(text)

    return checked


def json_path(*, make_parents: bool = False) -> Callable[[str], str]:
    """An argument's type: where JSON goes, a file or standard output."""
    to_file = output_path(JSON, make_parents=make_parents)
    return lambda text: text if text == STANDARD_OUTPUT else to_file(text)


def output_directory(text: str) -> Path:
    """An argument's type: a directory to write in, made when it is missing."""
    try:
        output_files.check_directory(Path(text))
    except RefusedOutputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def check_distinct(arguments: argparse.Namespace) -> None:
    """Refuse two outputs to one file. Raises CommandError, naming it."""
    seen: set[Path] = set()
    for value in vars(arguments).values():
        if isinstance(value, OutputPath):
            place = Path(value).resolve()
            if place in seen:
                raise CommandError(f"{value} is named for two outputs: name another file for one of them", exit_code=2)
            seen.add(place)


def add_option(parser: argparse._ActionsContainer, flag: str, default: Any, what: str = "", **options: Any) -> None:
    """Declare an option of the default's type; its help ends with the default."""
    what = f"{what} (default: %(default)s)".lstrip()
    parser.add_argument(flag, default=default, help=what, **{"type": type(default), **options})


def add_list(parser: argparse._ActionsContainer, flag: str, metavar: str, what: str) -> None:
    """Declare an option that may be given again; without it the list is empty."""
    parser.add_argument(flag, metavar=metavar, action="append", default=[], help=what)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--json FILE`."""
    parser.add_argument(
        "--json", metavar="FILE", type=json_path(), help="write the result as JSON ('-': standard output, nothing else)"
    )


def add_png_argument(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Declare `--png FILE`."""
    parser.add_argument("--png", metavar="FILE", type=output_path(PNG), default=default, help=what)


def add_output_argument(
    parser: argparse.ArgumentParser, kind: FileKind | None, what: str, *, required: bool = False
) -> None:
    """Declare `-o FILE`."""
    parser.add_argument("-o", "--output", metavar="FILE", type=output_path(kind), required=required, help=what)


def write_result(value: Any, text: str, destination: str | None) -> None:
    """Write a result as JSON, and print it as text unless the JSON is standard output. Raises as `write_json`."""
    write_json(value, destination)
    if destination != STANDARD_OUTPUT:
        print(text)


def write_json(value: Any, destination: str | None) -> None:
    """Write a Struct, dict or list as JSON to a file, or to standard output for `-`; `None` writes nothing.

    Raises CommandError when the file cannot be written.
    """
    if destination is None:
        return
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    if destination == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    with writing(destination):
        output_files.write(Path(destination), text.encode())


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """End the command with a sentence when the file cannot be written."""
    try:
        yield
    except RefusedOutputError as error:
        raise CommandError(str(error)) from error
    except BrokenPipeError:  # its reader ended, which is no failure
        raise
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error


def in_columns(rows: Sequence[Sequence[str]]) -> str:
    """A table, one line per row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def document_of(value: Any, leave_out: Container[str] = ()) -> Any:
    """A message by field name, which the wire leaves out; digests and packed numbers as hexadecimal text."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value).items()
        return {name: document_of(item) for name, item in fields if name not in leave_out}
    if isinstance(value, bytes):
        return value.hex()
    return [document_of(item) for item in value] if isinstance(value, (tuple, list)) else value
