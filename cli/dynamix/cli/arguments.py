"""Arguments that several commands share, each declared once, with its type; checked before any work starts."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamix.runtime import output_files
from dynamix.runtime.output_files import JSON, PNG, FileKind, RefusedOutputError

from .errors import MisuseError

STANDARD_OUTPUT = "-"
MAX_SEED = 2**31 - 1
"""Largest seed that every random number generator accepts."""
MAX_PORT = 65535


def count(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """An argument's type: an integer from `low` to `high` (`None`: no limit)."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid integer {text!r}") from None
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{value}: it must be {limits}")
        return value

    return integer


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """An argument's type: a finite number from `low` (`above`: greater than it) to `high`."""

    def finite(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid number {text!r}") from None
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            least = f"{'above' if above else 'at least'} {low:g}"
            limits = least if high == math.inf else f"{least} and at most {high:g}"
            raise argparse.ArgumentTypeError(f"{text}: it must be a number {limits}")
        return value

    return finite


seed = count(0, MAX_SEED)
"""An argument's type: a seed of random numbers."""


class OutputPath(str):
    """The path of a file to write; `check_outputs` checks it once all arguments are known."""

    __slots__ = ("kind", "make_parents")

    kind: FileKind
    make_parents: bool


def output_path(kind: FileKind, *, make_parents: bool = False) -> Callable[[str], OutputPath]:
    """An argument's type: the path of a file to write."""

    def path(text: str) -> OutputPath:
        if text == STANDARD_OUTPUT:
            raise argparse.ArgumentTypeError("'-' does not stand for standard output here: name a file")
        given = OutputPath(text)
        given.kind, given.make_parents = kind, make_parents
        return given

    return path


def output_directory(text: str) -> Path:
    """An argument's type: a directory to write in, made when it is missing."""
    try:
        output_files.check_directory(Path(text))
    except RefusedOutputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse output files that cannot or must not be written, and two outputs to one file. Raises MisuseError."""
    seen: set[Path] = set()
    for path in (value for value in vars(arguments).values() if isinstance(value, OutputPath)):
        try:
            output_files.check(Path(path), path.kind, force=arguments.force, make_parents=path.make_parents)
        except RefusedOutputError as error:
            raise MisuseError(str(error)) from error
        place = Path(path).resolve()
        if place in seen:
            raise MisuseError(f"{path} is named for two outputs: name another file for one of them")
        seen.add(place)


def add_option(parser: argparse._ActionsContainer, flag: str, default: Any, what: str = "", **options: Any) -> None:
    """Declare an option of the default's type, an integer from 1; its help ends with the default."""
    kind = count() if type(default) is int else type(default)
    parser.add_argument(
        flag, default=default, help=f"{what} (default: %(default)s)".lstrip(), **{"type": kind, **options}
    )


def add_list(parser: argparse._ActionsContainer, flag: str, metavar: str, what: str) -> None:
    """Declare an option that may be repeated; without it the list is empty."""
    parser.add_argument(flag, metavar=metavar, action="append", default=[], help=what)


def add_action(actions: Any, name: str, act: Callable[..., Any], what: str) -> argparse.ArgumentParser:
    """Declare an action of a command, as `create` in `dynamix keys create`; the chosen one is `arguments.act`."""
    one: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what)
    one.set_defaults(act=act)
    return one


def _add_output(parser: argparse.ArgumentParser, *flags: str, **options: Any) -> None:
    parser.add_argument(*flags, metavar="FILE", **options)
    if "--force" not in parser._option_string_actions:  # noqa: SLF001 - argparse has no other way to ask
        parser.add_argument("--force", action="store_true", help="replace any existing output file")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--json FILE`."""
    what = "write the result as JSON ('-': standard output, nothing else)"
    to_file = output_path(JSON)
    _add_output(parser, "--json", type=lambda text: text if text == STANDARD_OUTPUT else to_file(text), help=what)


def add_png_argument(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    """Declare `--png FILE`."""
    _add_output(parser, "--png", type=output_path(PNG), default=default, help=what)


def add_output_argument(parser: argparse.ArgumentParser, kind: FileKind, what: str, *, required: bool = False) -> None:
    """Declare `-o FILE`."""
    _add_output(parser, "-o", "--output", type=output_path(kind), required=required, help=what)


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--data DIR`."""
    what = "directory with the data sets (default: the usual places)"
    parser.add_argument("--data", metavar="DIR", type=Path, help=what)
