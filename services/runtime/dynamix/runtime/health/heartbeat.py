"""The heartbeat: shows every second that a process runs and is connected, and what it has counted."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Never

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError
from dynamix.schemas import subjects
from dynamix.schemas.messages import Live

from .watchdog import Watchdog

HEARTBEAT_S = 1.0


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

    forget = bus.when_denied(note)
    try:
        while True:
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
