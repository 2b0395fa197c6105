"""Checks of the broker, of the services on it, and of one job's stored actions."""

import asyncio
import contextlib
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from dynamix.arbitrator.deciding.job_log import ActionStoreError, check_receipt, newest_action, newest_receipt
from dynamix.cli.connection import connected
from dynamix.cli.errors import CommandError
from dynamix.cli.fleet import listen
from dynamix.cli.heartbeats import Heartbeats
from dynamix.cli.services import hear
from dynamix.runtime.bus import Bus, BusError, PermissionDeniedError, StreamMissingError, StreamState
from dynamix.runtime.settings import BusSettings, SharedSettings, node_name, read, redact_url
from dynamix.schemas import subjects
from dynamix.schemas.chain import BrokenChainError, ChainCheck
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Action, Job
from dynamix.schemas.streams import ACTIONS, JOBS, STREAMS

from . import DoctorCheck, Need, failed, forbidden, passed

CONNECT_TIMEOUT_S = 3.0
LOOKS_AT_COPIES, LOOK_AGAIN_S = 3, 1.0
"""A copy that lags each time; one of a busy stream does for milliseconds."""
LISTEN_S = 1.5
"""A service beats every second."""
ALIVE_TIMEOUT_S = 5.0
HOW_TO_CONNECT = "check DYNAMIX_NATS_URL, and _CREDS_FILE or _USER and _PASSWORD_FILE"
HOW_TO_LOOK = "ask with a key of `dynamix keys create NAME --role watcher`"
HOW_TO_CATCH_UP = (
    "start the server that is offline; one that was cut off may take two minutes to catch up; after that restart "
    "nats-server there, and until then no other (docs/measurements.md)"
)
HOW_TO_ASK = "ask as the user `watcher`, for a job that `dynamix top` shows"
HOW_TO_RESTORE = (
    "restore the broker's store from a backup, or start the run under a new id: the arbitrator decides nothing on it"
)


async def bus(settings: BusSettings, *, configured: bool) -> list[DoctorCheck]:
    """The broker and what runs on it. With `configured`, a broker that was asked for and is away is fatal."""
    need: Need = "always" if configured else "training"
    return [*credential(settings), *await _reached(settings, need, configured=configured)]


def credential(settings: BusSettings) -> list[DoctorCheck]:
    """The key's file, where others may read it."""
    file = settings.creds_file
    with contextlib.suppress(OSError):  # the attempt to connect reports it
        if file and Path(file).stat().st_mode & stat.S_IROTH:
            return [failed("key", "secrecy", f"{file} may be read by every user of this machine", f"chmod 600 {file}")]
    return []


async def _reached(settings: BusSettings, need: Need, *, configured: bool) -> list[DoctorCheck]:
    try:
        async with connected(settings, "doctor", timeout_s=CONNECT_TIMEOUT_S, wait=False) as connection:
            return [
                passed("broker", need, redact_url(settings.url)),
                await _streams(connection, need),
                *await _copies(connection),
                *await _services(connection),
            ]
    except CommandError as error:
        return [failed("broker", need, str(error), HOW_TO_CONNECT if configured else "start one with `dynamix up`")]


async def is_alive(settings: BusSettings, service: str, environ: Mapping[str, str]) -> bool:
    """Whether this machine's instance of a service beats and listens to its streams, for health checks."""
    shared = read(SharedSettings, "", environ)
    instance = shared.instance or node_name(shared)
    try:
        async with asyncio.timeout(ALIVE_TIMEOUT_S), connected(settings, "doctor", wait=False) as connection:
            return await hear(connection, lambda beat: bool(beat.counters.get("ready")), service, instance)
    except (TimeoutError, CommandError):
        return False


async def _streams(connection: Bus, need: Need) -> DoctorCheck:
    try:
        states = {stream.name: await connection.stream_state(stream.name) for stream in STREAMS}
    except StreamMissingError as error:
        return failed("streams", need, str(error).partition(":")[0] + ": not made yet", "run `dynamix provision`")
    except PermissionDeniedError:
        return forbidden("streams", need, HOW_TO_LOOK)
    except BusError as error:
        return failed("streams", need, str(error), "use a broker with JetStream")
    return passed("streams", need, ", ".join(f"{name} {state.num_messages:,}" for name, state in states.items()))


async def _copies(connection: Bus) -> list[DoctorCheck]:
    """Whether each stream of a cluster has all its copies; nothing where each has one, or cannot be looked at."""
    lagging: dict[str, StreamState] = {}
    for look in range(LOOKS_AT_COPIES):
        if look:
            await asyncio.sleep(LOOK_AGAIN_S)
        try:
            states = {stream.name: await connection.stream_state(stream.name) for stream in STREAMS}
        except BusError:  # the check of the streams says so
            return []
        copied = {name: state for name, state in states.items() if state.num_replicas > 1}
        if not copied:
            return []
        lagging = {name: state for name, state in copied.items() if not state.copies.are_whole(state.num_replicas)}
        if not lagging:
            counts = ", ".join(f"{name} {state.num_replicas}" for name, state in copied.items())
            return [passed("copies", "failover", f"all current: {counts}")]
    found = ". ".join(f"{name}: {state.copies}" for name, state in lagging.items())
    return [failed("copies", "failover", found, HOW_TO_CATCH_UP)]


async def _services(connection: Bus) -> list[DoctorCheck]:
    """Whether each service is heard; and, apart from that, what those that are heard complain of."""
    heartbeats = Heartbeats()
    try:
        await listen(connection, heartbeats, LISTEN_S)
    except PermissionDeniedError:
        return [forbidden("services", "training", HOW_TO_LOOK)]
    except BusError as error:
        return [failed("services", "training", str(error), HOW_TO_LOOK)]
    now_s = time.monotonic()
    if missing := heartbeats.missing(now_s):
        fix = "start them: `dynamix up`, or deploy/"
        found = [failed("services", "training", f"not heard: {', '.join(missing)}", fix)]
    else:
        found = [passed("services", "training", ", ".join(beat.live.service for beat in heartbeats.recent(now_s)))]
    if lost := heartbeats.num_not_stored(now_s):
        what = f"the broker did not store or answer {lost} messages and requests"
        found.append(failed("storage", "training", what, "make room on the broker's disk, then start the broker again"))
    if refused := heartbeats.count("refused_logs", now_s):
        what = f"the arbitrator refuses the stored actions of {refused} generation(s); it steers all other jobs"
        fix = "its log names the jobs; `dynamix doctor --actions JOB`"
        found.append(failed("actions", "training", what, fix))
    return found


async def actions(settings: BusSettings, job: str) -> DoctorCheck:
    """Check a job's stored actions: each as it was written, each after its predecessor, none missing at the end."""
    try:
        async with connected(settings, "doctor", wait=False) as connection:
            try:
                return await _check_actions(connection, job)
            except (ActionStoreError, BrokenChainError, MalformedMessageError) as error:
                return failed("actions", "training", str(error), HOW_TO_RESTORE)
            except (BusError, ValueError) as error:
                return failed("actions", "training", str(error), HOW_TO_ASK)
    except CommandError as error:
        return failed("actions", "training", str(error), HOW_TO_CONNECT)


async def _check_actions(connection: Bus, name: str) -> DoctorCheck:
    message = await connection.last(JOBS.name, subjects.of("job", name))
    if message is None:
        return failed("actions", "training", f"no job is called {name!r}", "`dynamix top` shows the jobs")
    job = decode(Job, message.subject, message.payload)
    receipt = await newest_receipt(connection, job)
    newest = await newest_action(connection, job)
    await check_receipt(connection, job, newest, receipt)
    if newest is None:
        return passed("actions", "training", f"none yet of {name}")
    num_actions = await _check_chain(connection, name, newest.sequence)
    where = f"window {newest.action.window} of generation {newest.action.generation}"
    return passed("actions", "training", f"{num_actions:,} of {name}, a whole chain up to {where}")


async def _check_chain(connection: Bus, name: str, last: int) -> int:
    """Check the chain up to a sequence; the number of actions."""
    check = ChainCheck()
    async with connection.consume(ACTIONS.name, [subjects.of("action", name)], start="all") as consumer:
        async for batch in consumer:
            for message in batch:
                if message.sequence <= last:
                    check.check_next(decode(Action, message.subject, message.payload), message.payload)
            if batch[-1].sequence >= last:
                break
    return check.num_actions
