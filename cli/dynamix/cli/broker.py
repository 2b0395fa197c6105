"""A command's connection to the broker: opened in a bounded time, and every failure said in a sentence."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError
from dynamix.runtime.settings import BusSettings, redact_url

from .errors import CommandError

CONNECT_TIMEOUT_S = 10.0
HOW_TO_START = "start one with `dynamix up`, or set DYNAMIX_NATS_URL"


class NoBrokerError(CommandError):
    """There is no broker at the address, or it does not answer."""


@contextlib.asynccontextmanager
async def connected(
    settings: BusSettings, name: str, *, timeout_s: float | None = None, wait: bool = True
) -> AsyncIterator[Bus]:
    """A bus for one command, closed at the end; the broker sees `<name>-<pid>`.

    Args:
        settings: address and credentials.
        name: of the command.
        timeout_s: for the broker's answer; 10 by default.
        wait: try again until `timeout_s` when nothing listens at the address.

    Raises:
        NoBrokerError: when the broker cannot be reached.
        CommandError: when it refuses the user, or an error of the bus leaves the context.
    """
    timeout_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            bus = await Bus.connect(settings, name=f"{name}-{os.getpid()}", wait=wait)
    except TimeoutError:
        where = redact_url(settings.url)
        raise NoBrokerError(f"no broker at {where} after {timeout_s:g} s: {HOW_TO_START}") from None
    except (PermissionDeniedError, ValueError) as error:
        raise CommandError(str(error)) from error
    except (BusError, OSError) as error:
        raise NoBrokerError(str(error)) from error
    try:
        yield bus
    except BusError as error:
        raise CommandError(str(error)) from error
    finally:
        await bus.close()
