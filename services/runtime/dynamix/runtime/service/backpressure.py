"""Publishing what must not be given up to a stream that may be full: wait for room, unless the service is to stop."""

import asyncio
import contextlib
from typing import Any

from dynamix.runtime.bus import StreamFullError
from dynamix.runtime.bus.service_bus import ServiceBus
from dynamix.schemas.messages import Message

from .context import Context

ROOM_WAIT_S = 1.0


async def publish_when_room(context: Context[Any, ServiceBus], message: Message) -> bool:
    """Publish and wait for the acknowledgement; False when the service is to stop and there was no room.

    Each wait is counted as `waits_for_room`. Raises as `Bus.publish`, but for StreamFullError.
    """
    while True:
        try:
            await context.bus.publish(message)
        except StreamFullError:
            context.count("waits_for_room")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROOM_WAIT_S):
                    await context.stop.wait()
            if context.stop.is_set():
                return False
        else:
            return True
