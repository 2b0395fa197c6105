"""The generation of a job's last start, as the bus knows it: asked once, when a session attaches, for 2 s at most."""

import asyncio
import logging
import threading

from dynamix.runtime.bus import Bus
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode
from dynamix.schemas.messages import Job
from dynamix.schemas.streams import JOBS

LOOKUP_S = 2.0
"""The longest that attaching waits for an answer. Without a broker the refused connection is one."""

_log = logging.getLogger("dynamix.trainer")


def last_generation(settings: BusSettings, job: str, *, name: str) -> int | None:
    """The generation of the job's last start; `None` when there was none, or the bus does not answer in time.

    In a thread of its own: the caller may run an event loop.
    """
    found: list[int] = []
    thread = threading.Thread(target=_ask, args=(settings, job, name, found), name="dynamix bus look-up", daemon=True)
    thread.start()
    thread.join(LOOKUP_S)
    return found[0] if found else None


def _ask(settings: BusSettings, job: str, name: str, found: list[int]) -> None:
    try:
        generation = asyncio.run(_look_up(settings, job, name))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the bus, training begins without an answer
        _log.info("cannot ask the bus for earlier starts of %s: %s: %s", job, type(error).__name__, error)
    else:
        found += [] if generation is None else [generation]


async def _look_up(settings: BusSettings, job: str, name: str) -> int | None:
    async with asyncio.timeout(LOOKUP_S):
        bus = await Bus.connect(settings, name=name, wait=False)
        try:
            message = await bus.last(JOBS.name, subjects.job(job))
        finally:
            await bus.close()
    return None if message is None else decode(Job, message.subject, message.payload).generation
