"""The heartbeat: shows every second that a process runs and is connected, and what it has counted."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Never

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError
from dynamix.schemas import subjects
from dynamix.schemas.messages import Live

from .watchdog import Watchdog

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
DAY_S = 24 * 3600.0
WARN_BEFORE_S = 30 * DAY_S
"""A credential that expires is warned of once a day."""


async def send_heartbeats(
    bus: Bus,
    watchdog: Watchdog,
    counters: Callable[[], Mapping[str, int]],
    *,
    service: str,
    instance: str,
    node: str,
    started_s: float,
) -> Never:
    """Send a heartbeat every `HEARTBEAT_S`, until cancelled. One that the bus does not take is left out.

    It holds the process's `counters`, the bus's own with the prefix `bus_`, how late the event loop ran by the watchdog
    (`loop_lag_ms` since the last heartbeat, `max_loop_lag_ms` in all), and the uptime since `started_s` (monotonic).

    Raises:
        PermissionDeniedError: when the broker denies them. Then the login is that of another service or node, and this
            one would take messages from where they belong, unheard.
    """
    denied: asyncio.Future[PermissionDeniedError] = asyncio.get_running_loop().create_future()
    ours = subjects.of("live", service, instance).lower()

    def note(subject: str, denial: PermissionDeniedError) -> None:
        if subject == ours and not denied.done():
            denied.set_result(denial)

    def heartbeat() -> Live:
        shown = {f"bus_{name}": value for name, value in bus.counters.items()} | dict(counters())
        shown["loop_lag_ms"] = int(1000 * watchdog.take_max_lag_s())
        shown["max_loop_lag_ms"] = int(1000 * watchdog.max_lag_s)
        uptime_s = time.monotonic() - started_s
        return Live(service=service, instance=instance, node=node, uptime_s=uptime_s, counters=shown)

    forget, warn_at = bus.when_denied(note), 0.0
    try:
        while True:
            left = bus.seconds_left
            if left is not None and left < WARN_BEFORE_S and time.monotonic() >= warn_at:
                warn_at = time.monotonic() + DAY_S
                fix = "replace its file by a new one of `dynamix keys create`"
                logger.warning("the credential of this %s expires in %.1f days: %s", service, left / DAY_S, fix)
            with contextlib.suppress(BusError):
                await bus.publish_live(heartbeat())
            if (await asyncio.wait([denied], timeout=HEARTBEAT_S))[0]:
                raise PermissionDeniedError(f"{denied.result()}; {_of_another(service, node, instance)}")
    finally:
        forget()


def _of_another(service: str, node: str, instance: str) -> str:
    """The fix of a login that is not this service's."""
    limit = {"collector": f" --node {node}", "reward": f" --instance {instance}"}.get(service, "")
    made = f"dynamix keys create NAME --role {service}{limit}"
    wrong = "its login is for another service, node or instance"
    return f"{wrong}: correct DYNAMIX_NODE or DYNAMIX_INSTANCE, or give it a key of `{made}`"
