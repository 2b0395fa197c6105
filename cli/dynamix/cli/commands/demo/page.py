"""The demo's page: `dynamix dashboard` of the demo's own broker, while its jobs train."""

import asyncio
import contextlib
import os
import sys
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping

from dynamix.cli.board.fleet import Fleet
from dynamix.cli.errors import MISUSED, explained
from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import SettingsError, read

GRAPHICAL = ("DISPLAY", "WAYLAND_DISPLAY")


def demo_page(announce: Callable[[str], None]) -> Callable[[Bus], contextlib.AbstractAsyncContextManager[None]]:
    """What shows a bus as a page, on a free port unless a setting names one.

    Raises:
        CommandError: when a setting is misspelt or has a wrong value.
        ModuleNotFoundError: without the extra `dashboard`.
    """
    from dynamix.cli.dashboard.server import DashboardServer
    from dynamix.cli.dashboard.settings import DashboardSettings, token_of

    with explained(SettingsError, exit_code=MISUSED):
        settings = read(DashboardSettings, "dashboard", {"DYNAMIX_DASHBOARD_PORT": "0", **_set(os.environ)})
    token = token_of(settings)

    @contextlib.asynccontextmanager
    async def shown(bus: Bus) -> AsyncIterator[None]:
        fleet = Fleet(bus)
        following = asyncio.create_task(fleet.follow(), name="fleet")
        server = DashboardServer(host=settings.host, port=settings.port, token=token, fleet=fleet)
        try:
            async with server:
                announce(f"The page: {server.url} (until the demo ends)")
                if sys.stderr.isatty() and any(os.environ.get(name) for name in GRAPHICAL):
                    await asyncio.to_thread(webbrowser.open, server.url)
                yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    return shown


def _set(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith("DYNAMIX_") and value}
