"""What every benchmark does with its figures: a table or JSON, and an exit code when a target is missed."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """`--json` and `--no-targets`."""
    parser.add_argument("--json", metavar="FILE", help="write the figures here; - is standard output")
    parser.add_argument("--no-targets", action="store_true", help="only report: exit code 0 also when one is missed")


def write_json(figures: dict[str, Any], target: str | None) -> None:
    """To a file, to standard output (`-`), or nowhere."""
    if target == "-":
        print(json.dumps(figures, indent=2))
    elif target:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text(json.dumps(figures, indent=2) + "\n")


def exit_code(name: str, missed: Sequence[str], options: argparse.Namespace) -> int:
    """1, with a line on standard error, when a target was missed and targets count."""
    if not missed or options.no_targets:
        return 0
    print(f"{name}: target missed: {', '.join(missed)}", file=sys.stderr)
    return 1
