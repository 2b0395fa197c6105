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
import sys
from pathlib import Path

from dynamix.cli.connection import connected, find
from dynamix.cli.dashboard import DashboardSettings, token_of
from dynamix.cli.documents import CapturedJob
from dynamix.cli.errors import MISUSED, CommandError, MisuseError, explained, reading
from dynamix.cli.terminal import stop_event
from dynamix.recording.capture import CaptureError
from dynamix.runtime.log import configure as configure_log
from dynamix.runtime.settings import SettingsError, read

MOST_CAPTURES = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("files", metavar="FILE", nargs="*", help="a capture to show instead of the broker's jobs")
    parser.add_argument("--host", metavar="ADDRESS", help="listen on this address (default: 127.0.0.1)")
    parser.add_argument("--port", metavar="N", help="listen on this port; 0 takes a free one (default: 8650)")
    parser.add_argument("--token-file", metavar="FILE", help="require the token in this file for every request")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; 0 after one."""
    if len(arguments.files) > MOST_CAPTURES:
        raise MisuseError(f"{len(arguments.files)} files: the page shows {MOST_CAPTURES} captures at most")
    given = {name: getattr(arguments, name) for name in ("host", "port", "token_file")}
    flags = {name: value for name, value in given.items() if value}
    with explained(SettingsError, exit_code=MISUSED):
        settings = read(DashboardSettings, "dashboard", os.environ, flags)
    with explained(ValueError, exit_code=MISUSED), reading(settings.token_file):
        token = token_of(settings)
    configure_log("critical")  # the terminal belongs to the URL
    captures = []
    for file in arguments.files:
        with explained(CaptureError), reading(file):
            captures.append(CapturedJob(Path(file)))
    try:
        asyncio.run(_serve(settings, token, captures))
    except OSError as error:
        where, why = f"{settings.host}:{settings.port}", error.strerror or error
        raise CommandError(f"cannot listen on {where}: {why}; --port 0 takes a free port of this machine") from error
    return 0


async def _serve(settings: DashboardSettings, token: str, captures: list[CapturedJob]) -> None:
    from dynamix.cli.dashboard.server import DashboardServer, served

    async with contextlib.AsyncExitStack() as stack:
        stop = stack.enter_context(stop_event())
        if captures:
            server = DashboardServer(host=settings.host, port=settings.port, token=token, captures=captures)
            await stack.enter_async_context(server)
        else:
            bus = await stack.enter_async_context(connected(find(os.environ), "dashboard"))
            server = await stack.enter_async_context(served(bus, settings, token))
        # A token that was set is not shown: what this prints may become a log.
        url, secret = server.url, "; who has this URL can read everything" if token else ""
        if given := settings.token_file or (settings.token and "DYNAMIX_DASHBOARD_TOKEN"):
            url = url.partition("?")[0]
            secret = f"; the first visit needs {url}?token= and what {given} holds"
        print(f"{url} shows the page (read-only{secret}); Ctrl-C ends it", file=sys.stderr, flush=True)
        await stop.wait()
