"""What every benchmark does with its figures: a table or JSON, and an exit code when a target is missed."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamix.cli.output import json_path, output_path
from dynamix.runtime import output_files
from dynamix.runtime.output_files import PNG


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--no-targets`."""
    parser.add_argument(
        "--json", metavar="FILE", type=json_path(make_parents=True), help="write the figures here; - is standard output"
    )
    parser.add_argument("--no-targets", action="store_true", help="only report: exit code 0 also when one is missed")


def add_png_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """`--png`."""
    parser.add_argument("--png", metavar="FILE", type=output_path(PNG, make_parents=True), help=what)


def write_json(figures: dict[str, Any], target: str | None) -> None:
    """To a file, to standard output (`-`), or nowhere."""
    if target == "-":
        print(json.dumps(figures, indent=2))
    elif target:
        output_files.write(Path(target), (json.dumps(figures, indent=2) + "\n").encode(), make_parents=True)


def exit_code(name: str, missed: Sequence[str], options: argparse.Namespace) -> int:
    """1, with a line on standard error, when a target was missed and targets count."""
    if not missed or options.no_targets:
        return 0
    print(f"{name}: target missed: {', '.join(missed)}", file=sys.stderr)
    return 1
