"""Machine-readable output: every table of a command can be had as JSON."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from .errors import CommandError

STANDARD_OUTPUT = "-"


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--json FILE`."""
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON ('-': standard output, nothing else)")


def write_json(value: Any, destination: str) -> None:
    """Write a Struct, dict or list as JSON to a file, or to standard output for `-`.

    Raises:
        CommandError: when the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    if destination == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(destination).write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write {destination}: {error.strerror}") from error
