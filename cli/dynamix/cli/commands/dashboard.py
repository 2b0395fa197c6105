"""Show all jobs and services on the broker as a web page while they run; or show one or two captures.

  dynamix dashboard                     what runs now
  dynamix dashboard FILE                a capture, with a slider for the time
  dynamix dashboard FILE FILE           two captures beside each other

The page only reads. It listens on 127.0.0.1: from another machine, forward the port (ssh -L 8650:127.0.0.1:8650 HOST).
With another --host every request needs a token, which is part of the printed URL. Traffic is not encrypted: put a proxy
with TLS in front of it in networks that you do not trust.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import sys
from pathlib import Path

from dynamix.cli.arguments import MAX_PORT, add_option, count
from dynamix.cli.connection import connected, find
from dynamix.cli.documents import CapturedJob
from dynamix.cli.errors import MISUSED, CommandError, MisuseError, explained, reading
from dynamix.cli.terminal import stop_event
from dynamix.recording.capture import CaptureError
from dynamix.runtime.input_files import read_regular
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import is_loopback

MOST_CAPTURES = 2
MIN_TOKEN_CHARACTERS = 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("files", metavar="FILE", nargs="*", help="a capture to show instead of the broker's jobs")
    add_option(parser, "--host", "127.0.0.1", "listen on this address", metavar="ADDRESS")
    what = "listen on this port; 0 takes a free one"
    add_option(parser, "--port", 8650, what, type=count(0, MAX_PORT), metavar="N")
    parser.add_argument("--token-file", metavar="FILE", help="require the token in this file for every request")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; 0 after one."""
    if len(arguments.files) > MOST_CAPTURES:
        raise MisuseError(f"{len(arguments.files)} files: the page shows {MOST_CAPTURES} captures at most")
    with explained(ValueError, exit_code=MISUSED), reading(arguments.token_file):
        token = token_of(arguments.host, arguments.token_file)
    configure_log("critical")  # the terminal belongs to the URL
    captures = []
    for file in arguments.files:
        with explained(CaptureError), reading(file):
            captures.append(CapturedJob(Path(file)))
    try:
        asyncio.run(_serve(arguments, token, captures))
    except OSError as error:
        where, why = f"{arguments.host}:{arguments.port}", error.strerror or error
        raise CommandError(f"cannot listen on {where}: {why}; --port 0 takes a free port of this machine") from error
    return 0


def token_of(host: str, file: str | None) -> str:
    """The token that readers need: the one in the file, beyond loopback else a new one; empty: none is needed.

    Raises:
        OSError: when the file cannot be read.
        ValueError: when the token is too short.
    """
    if not file:
        return "" if is_loopback(host) else secrets.token_urlsafe(24)
    token = read_regular(Path(file)).decode(errors="replace").strip()
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ValueError(f"{file}: a token needs at least {MIN_TOKEN_CHARACTERS} printable ASCII characters")
    return token


async def _serve(arguments: argparse.Namespace, token: str, captures: list[CapturedJob]) -> None:
    from dynamix.cli.dashboard.server import DashboardServer, served

    where = {"host": arguments.host, "port": arguments.port, "token": token}
    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stop_event())
        if captures:
            server = await stack.enter_async_context(DashboardServer(captures=captures, **where))
        else:
            bus = await stack.enter_async_context(connected(find(os.environ), "dashboard"))
            server = await stack.enter_async_context(served(bus, **where))
        # A token that was set is not shown: what this prints may become a log.
        url, secret = server.url, "; who has this URL can read everything" if token else ""
        if arguments.token_file:
            url = url.partition("?")[0]
            secret = f"; the first visit needs {url}?token= and what {arguments.token_file} holds"
        print(f"{url} shows the page (read-only{secret}); Ctrl-C ends it", file=sys.stderr, flush=True)
        await stop.wait()
