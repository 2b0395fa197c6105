"""Signals that ask a running command to finish."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def stop_event(*extra: signal.Signals) -> Iterator[asyncio.Event]:
    """An event that SIGINT, SIGTERM and `extra` set while the context lasts; needs a running event loop."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, *extra)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
