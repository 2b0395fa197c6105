"""Start a training script with torchrun and tell which rank, link or loader is slow; no line or bit of it changes.

  dynamix watch -- --standalone --nproc-per-node 4 train.py --epochs 1

Everything after `--` is passed to torchrun unchanged. A line appears when something slow is found, and every ten
seconds; a table, and what each remedy would save, at the end. On several nodes run it on each: that of rank 0 reports.
It needs no broker and no service.
"""

import argparse
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dynamix.cli.arguments import add_json_argument
from dynamix.cli.output import write_json
from dynamix.cli.watching import Watched, page
from dynamix.schemas.watching import Row

from .train import torchrun_words

POLL_S = 0.2
"""Between two looks whether torchrun has ended, while no rows come."""
EVERY_S = 10.0
"""Between two lines while nothing new is found."""
NOTHING = (
    "dynamix watch: no step of a DistributedDataParallel model was seen on all ranks. Train it in the process that "
    "torchrun starts, for more than a second, by loss.backward() and optimizer.step(); a script that attaches has its "
    "own report; if compiled, compile it before it is wrapped; "
    "on several nodes, that of rank 0 reports"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_json_argument(parser)
    parser.add_argument(
        "torchrun", nargs="*", metavar="-- ARGUMENT", help="torchrun's options, the script, and its arguments"
    )


def run(arguments: argparse.Namespace) -> int:
    """Watch until torchrun ends; returns its exit code."""
    words = torchrun_words(arguments)
    watched = Watched()
    with tempfile.TemporaryDirectory(prefix="dynamix-watch-") as directory:
        path = str(Path(directory, "rows"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as rows:
            rows.bind(path)
            rows.settimeout(POLL_S)
            command = [sys.executable, "-m", "dynamix.trainer.watched_script", "launch", path, *words]
            exit_code = follow(command, rows, watched)
    report = watched.report()
    if report is not None and arguments.json is not None:
        write_json(report, arguments.json)
    print(NOTHING if report is None else page(report), file=sys.stderr)
    return exit_code


def follow(command: Sequence[str], rows: socket.socket, watched: Watched) -> int:
    """Start torchrun and take in rows until it ends; print a line now and then. Returns the exit code."""
    job = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches torchrun, too; either way we report
    signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    shown: set[str] = set()
    shown_s = time.monotonic()
    while True:
        try:
            packet = rows.recv(1 << 20)
        except TimeoutError:
            if job.poll() is not None:
                return job.returncode if job.returncode >= 0 else 128 - job.returncode
            continue
        has_ended = watched.add(msgspec.msgpack.decode(packet, type=Row))
        names = {each.name for each in watched.found}
        if has_ended and (names - shown or time.monotonic() > shown_s + EVERY_S):
            found = ". ".join(each.text for each in watched.found) or "No rank, link or loader is slow"
            print(f"dynamix watch: step {watched.num_steps}: {found}", file=sys.stderr, flush=True)
            shown_s, shown = time.monotonic(), shown | names
