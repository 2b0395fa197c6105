"""Runs a benchmark as a user would, with numbers too small to judge anything."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_bench(name: str, result: Path, *arguments: str) -> dict[str, Any]:
    """What `python -m bench.NAME` writes; its targets are not judged."""
    command = [sys.executable, "-m", f"bench.{name}", "--no-targets", "--json", str(result), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found
