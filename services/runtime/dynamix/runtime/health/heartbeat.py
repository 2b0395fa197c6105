"""The heartbeat: shows every second that a process runs and is connected, and what it has counted."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Never

from dynamix.runtime.bus import Bus, BusError
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
    """
    while True:
        shown = {f"bus_{name}": value for name, value in bus.counters.items()} | dict(counters())
        shown["loop_lag_ms"] = int(1000 * watchdog.take_max_lag_s())
        shown["max_loop_lag_ms"] = int(1000 * watchdog.max_lag_s)
        uptime_s = time.monotonic() - started_s
        with contextlib.suppress(BusError):
            await bus.publish_live(
                Live(service=service, instance=instance, node=node, uptime_s=uptime_s, counters=shown)
            )
        await asyncio.sleep(HEARTBEAT_S)
