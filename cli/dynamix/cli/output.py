"""Results as files and as JSON: the kinds of files that the program recognises as its own, and documents."""

import contextlib
import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.output_files import FileKind, RefusedOutputError
from dynamix.schemas.messages.allocation import Allocation, Exchange

from .arguments import STANDARD_OUTPUT
from .errors import CommandError

Document = dict[str, Any]
"""An object of JSON."""
ActionResult = tuple[str, Document]
"""The result of a command's action: text for people, data for `--json`."""

CAPTURE = FileKind("an empty file", lambda _: False)
"""A capture cannot be made again, so that an existing one needs --force."""
POLICY = FileKind("a learned policy", lambda head: head[8:9] == b"{" and b'"dynamix"' in head)
SCENARIO = FileKind("a scenario", lambda head: re.search(rb"^workload\s*=", head, re.MULTILINE) is not None)
TUNED = FileKind("a file of tuned settings", lambda head: b"\ncommand = " in head and b"\nnum_settings = " in head)


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
    else:
        write_file(destination, text.encode())


def write_file(path: str | Path, content: bytes) -> None:
    """Write a whole file. Raises CommandError when it cannot be written."""
    with writing(path):
        output_files.write(Path(path), content)


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """End the command with a sentence when the file cannot be written."""
    try:
        yield
    except RefusedOutputError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error


def document_of(value: Any, leave_out: Container[str] = ()) -> Any:
    """A message by field name, which the wire leaves out; digests and packed numbers as hexadecimal text."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        if isinstance(value, Exchange):
            fields["label"] = value.label
        if isinstance(fields.get("allocation"), Allocation):  # levers stand beside the other fields of an action
            fields |= msgspec.structs.asdict(fields.pop("allocation"))
        return {name: document_of(item) for name, item in fields.items() if name not in leave_out}
    if isinstance(value, bytes):
        return value.hex()
    return [document_of(item) for item in value] if isinstance(value, (tuple, list)) else value
