"""A command's connection to the broker: opened in a bounded time, and every failure said in a sentence."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from dynamix.runtime.bus import Bus, BusError
from dynamix.runtime.settings import BusSettings, redact_url

from .errors import CommandError

CONNECT_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def connected(settings: BusSettings, name: str, *, timeout_s: float | None = None) -> AsyncIterator[Bus]:
    """A bus for one command, closed at the end; the broker sees `<name>-<pid>`.

    Raises:
        CommandError: when the broker cannot be reached within `timeout_s` (default 10), refuses us, or refuses what is
            asked of it.
    """
    where = redact_url(settings.url)
    timeout_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            bus = await Bus.connect(settings, name=f"{name}-{os.getpid()}")
    except TimeoutError:
        raise CommandError(
            f"no broker at {where} after {timeout_s:g} s: start one with `dynamix up`, or set DYNAMIX_NATS_URL"
        ) from None
    except (BusError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    try:
        yield bus
    except BusError as error:
        raise CommandError(str(error)) from error
    finally:
        await bus.close()
