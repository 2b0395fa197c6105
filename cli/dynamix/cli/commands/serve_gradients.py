"""Sum a share of every gradient bucket of a job for all its ranks, in a separate process (a parameter server).

  host-a$ dynamix serve-gradients --port 29600
  host-b$ dynamix serve-gradients --port 29600
  host-c$ DYNAMIX_TRAINER_GRADIENT_SERVERS=host-a:29600,host-b:29600 dynamix train -- ... train.py

It has no model and needs no GPU; it serves one job after the other. If it ends, its job ends with an error, at the
latest at the time-out of the process group. It has no credentials: run it in a network that you trust.
GLOO_SOCKET_IFNAME chooses the interface, as for the ranks.
"""

import argparse
import os
import signal
import threading

from dynamix.cli.arguments import MAX_PORT, add_option, count
from dynamix.cli.errors import CommandError

DEFAULT_PORT = 29600


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_option(parser, "--port", DEFAULT_PORT, "TCP port to listen on; 0 takes a free one", type=count(0, MAX_PORT))


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: additions of one bucket gain nothing from threads
    from dynamix.trainer.exchange.servers import GradientServer

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        server = GradientServer(arguments.port, _say)
    except RuntimeError as error:
        raise CommandError(f"cannot listen on port {arguments.port}: {error}") from error
    _say(f"serving gradients on port {server.port}")
    server.run(stop)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
