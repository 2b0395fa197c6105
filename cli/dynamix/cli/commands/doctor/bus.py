"""Checks of the broker: is it there, does it know us, has it the streams, are the services alive."""

import asyncio
import time
from collections.abc import Mapping

from dynamix.cli.board.heartbeats import Heartbeats
from dynamix.runtime.bus import Bus, BusError, StreamMissingError
from dynamix.runtime.settings import BusSettings, SharedSettings, node_name, read, redact_url
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Live
from dynamix.schemas.streams import STREAMS

from .finding import Finding, Need, lacking, there

CONNECT_TIMEOUT_S = 3.0
LISTEN_S = 1.5
"""A service beats every second."""
ALIVE_TIMEOUT_S = 5.0


async def bus(settings: BusSettings, *, configured: bool) -> list[Finding]:
    """The broker and what runs on it. With `configured`, a broker that was asked for and is away is fatal."""
    need: Need = "always" if configured else "training"
    where = redact_url(settings.url)
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            connection = await Bus.connect(settings, name="doctor", wait=False)
    except TimeoutError:
        return [lacking("broker", need, f"no answer from {where}", _mend(configured=configured))]
    except (BusError, ValueError, OSError) as error:
        return [lacking("broker", need, str(error), _mend(configured=configured))]
    try:
        return [there("broker", need, where), await _streams(connection, need), await _services(connection)]
    finally:
        await connection.close()


async def is_alive(settings: BusSettings, service: str, environ: Mapping[str, str]) -> bool:
    """Whether this machine's instance of a service beats and listens to its streams, for health checks."""
    shared = read(SharedSettings, "", environ)
    wanted = subjects.live(service, shared.instance or node_name(shared))
    try:
        async with asyncio.timeout(ALIVE_TIMEOUT_S):
            connection = await Bus.connect(settings, name="doctor", wait=False)
            try:
                async with connection.subscribe(wanted) as beats:
                    async for message in beats:
                        if decode(Live, message.subject, message.payload).counters.get("ready"):
                            return True
            finally:
                await connection.close()
    except (TimeoutError, BusError, ValueError, OSError):
        return False
    return False


def _mend(*, configured: bool) -> str:
    return "check DYNAMIX_NATS_URL, _USER and _PASSWORD_FILE" if configured else "start one with `dynamix up`"


async def _streams(connection: Bus, need: Need) -> Finding:
    try:
        states = {stream.name: await connection.stream_state(stream.name) for stream in STREAMS}
    except StreamMissingError as error:
        return lacking("streams", need, str(error).partition(":")[0] + ": not made yet", "run `dynamix provision`")
    except BusError as error:
        return lacking("streams", need, str(error), "use a broker with JetStream and a user who may read the streams")
    return there("streams", need, ", ".join(f"{name} {state.num_messages:,}" for name, state in states.items()))


async def _services(connection: Bus) -> Finding:
    heartbeats = Heartbeats()
    try:
        await _listen(connection, heartbeats)
    except BusError as error:
        return lacking("services", "training", str(error), "ask as the user `watcher`")
    missing = heartbeats.missing(time.monotonic())
    heard = ", ".join(beat.live.service for beat in heartbeats.recent(time.monotonic()))
    if missing:
        mend = "start them: `dynamix up`, or deploy/"
        return lacking("services", "training", f"not heard: {', '.join(missing)}", mend)
    if refused := heartbeats.count("refused_logs", time.monotonic()):
        found = f"{heard}; the arbitrator refuses the stored actions of {refused} generation(s)"
        return lacking("services", "training", found, "its log names the jobs; `dynamix doctor --actions JOB`")
    return there("services", "training", heard)


async def _listen(connection: Bus, heartbeats: Heartbeats) -> None:
    try:
        async with (
            asyncio.timeout(LISTEN_S),
            connection.subscribe(subjects.live(subjects.ANY, subjects.ANY)) as beats,
        ):
            async for message in beats:
                try:
                    heartbeats.record(decode(Live, message.subject, message.payload), time.monotonic())
                except MalformedMessageError:
                    continue  # any client may publish here
                if not heartbeats.missing(time.monotonic()):
                    return
    except TimeoutError:
        return
