"""Checks of the broker: it answers, accepts the user, has the streams; the services are alive."""

import asyncio
import time
from collections.abc import Mapping

from dynamix.cli.board.heartbeats import Heartbeats
from dynamix.cli.broker import connected
from dynamix.cli.errors import CommandError
from dynamix.runtime.bus import Bus, BusError, StreamMissingError
from dynamix.runtime.settings import BusSettings, SharedSettings, node_name, read, redact_url
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Live
from dynamix.schemas.streams import STREAMS

from .check import DoctorCheck, Need, failed, passed

CONNECT_TIMEOUT_S = 3.0
LISTEN_S = 1.5
"""A service beats every second."""
ALIVE_TIMEOUT_S = 5.0


async def bus(settings: BusSettings, *, configured: bool) -> list[DoctorCheck]:
    """The broker and what runs on it. With `configured`, a broker that was asked for and is away is fatal."""
    need: Need = "always" if configured else "training"
    try:
        async with connected(settings, "doctor", timeout_s=CONNECT_TIMEOUT_S, wait=False) as connection:
            return [
                passed("broker", need, redact_url(settings.url)),
                await _streams(connection, need),
                await _services(connection),
            ]
    except CommandError as error:
        fix = "check DYNAMIX_NATS_URL, _USER and _PASSWORD_FILE" if configured else "start one with `dynamix up`"
        return [failed("broker", need, str(error), fix)]


async def is_alive(settings: BusSettings, service: str, environ: Mapping[str, str]) -> bool:
    """Whether this machine's instance of a service beats and listens to its streams, for health checks."""
    shared = read(SharedSettings, "", environ)
    wanted = subjects.live(service, shared.instance or node_name(shared))
    try:
        async with (
            asyncio.timeout(ALIVE_TIMEOUT_S),
            connected(settings, "doctor", wait=False) as connection,
            connection.subscribe(wanted) as beats,
        ):
            async for message in beats:
                if decode(Live, message.subject, message.payload).counters.get("ready"):
                    return True
    except (TimeoutError, CommandError, MalformedMessageError):
        return False
    return False


async def _streams(connection: Bus, need: Need) -> DoctorCheck:
    try:
        states = {stream.name: await connection.stream_state(stream.name) for stream in STREAMS}
    except StreamMissingError as error:
        return failed("streams", need, str(error).partition(":")[0] + ": not made yet", "run `dynamix provision`")
    except BusError as error:
        return failed("streams", need, str(error), "use a broker with JetStream and a user who may read the streams")
    return passed("streams", need, ", ".join(f"{name} {state.num_messages:,}" for name, state in states.items()))


async def _services(connection: Bus) -> DoctorCheck:
    heartbeats = Heartbeats()
    try:
        await _listen(connection, heartbeats)
    except BusError as error:
        return failed("services", "training", str(error), "ask as the user `watcher`")
    missing = heartbeats.missing(time.monotonic())
    heard = ", ".join(beat.live.service for beat in heartbeats.recent(time.monotonic()))
    if missing:
        fix = "start them: `dynamix up`, or deploy/"
        return failed("services", "training", f"not heard: {', '.join(missing)}", fix)
    if refused := heartbeats.count("refused_logs", time.monotonic()):
        found = f"{heard}; the arbitrator refuses the stored actions of {refused} generation(s)"
        return failed("services", "training", found, "its log names the jobs; `dynamix doctor --actions JOB`")
    return passed("services", "training", heard)


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
