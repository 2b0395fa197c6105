"""The services: as child processes of a command, and by their heartbeats; and work beside a command's own."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from typing import IO, Any

import msgspec

from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import DIE_WITH_PARENT
from dynamix.runtime.settings import BUS_PREFIX, BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Live

SERVICES = ("collector", "reward", "arbitrator")
"""The services that steer a job: without a heartbeat of each, none is steered."""
STOP_TIMEOUT_S = 10.0
LATE_AFTER_S = 3.0
"""Three heartbeats missed."""
KEPT_S = 60.0
UNANSWERED = ("bus_unacknowledged", "bus_unanswered")
"""Counters of a process whose broker does not store now."""
NOT_STORED = (*UNANSWERED, "bus_failed_lately")
"""And of one whose broker did not, within the last minute."""


def bus_environment(settings: BusSettings) -> dict[str, str]:
    """The broker's address and credentials as environment variables: arguments would show them to the whole machine."""
    fields = {name: str(getattr(settings, name)) for name in settings.__struct_fields__}
    return {f"{BUS_PREFIX}{name.upper()}": value for name, value in fields.items() if value}


class ServiceProcess:
    """A service in a separate process."""

    def __init__(self, name: str, environ: Mapping[str, str], output: IO[bytes] | int | None = None) -> None:
        """Prepare `python -m dynamix.<name>` with `environ` added to ours; `output` takes its log (None: ours)."""
        self.name = name
        # What a deployment left in our environment is for another broker than the one that is given.
        foreign = BUS_PREFIX if any(name.startswith(BUS_PREFIX) for name in environ) else ()
        ours = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self._environ = {**ours, **environ}
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The running process's id."""
        assert self._process is not None, "start it first"
        return self._process.pid

    def start(self) -> None:
        """Start it; the kernel ends it when this process ends."""
        guard = [sys.executable, "-I", "-S", str(DIE_WITH_PARENT), str(os.getpid())]
        self._process = subprocess.Popen(
            [*guard, sys.executable, "-m", f"dynamix.{self.name}"],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            process_group=0,  # Ctrl-C is for the command; it ends its services itself
        )

    def exit_code(self) -> int | None:
        """`None` while it runs."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None, "start it first"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Ask it to drain and end; kill it when it does not."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextlib.asynccontextmanager
async def beside(*works: Coroutine[Any, Any, object]) -> AsyncGenerator[None, None]:
    """Do other work for as long as the context lasts; raises its first error, also in the midst of the context."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            try:
                yield
            finally:
                for task in tasks:
                    if not task.cancelling():  # a second time would interrupt how it ends
                        task.cancel()
    except BaseExceptionGroup as raised:
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from raised


async def wait_until_ready(bus: Bus, names: Collection[str], timeout_s: float = 120.0) -> None:
    """Wait until each named service reports in a heartbeat that it is ready. Raises TimeoutError, naming the others."""
    missing = set(names)

    def were_all(beat: Live) -> bool:
        if beat.counters.get("ready"):
            missing.discard(beat.service)
        return not missing

    try:
        async with asyncio.timeout(timeout_s):
            if missing:
                await hear(bus, were_all)
    except TimeoutError:
        raise TimeoutError(f"not ready after {timeout_s:g} s: {', '.join(sorted(missing))}") from None


async def hear(
    bus: Bus, is_last: Callable[[Live], object], service: str = subjects.ANY, instance: str = subjects.ANY
) -> bool:
    """Hand every heartbeat to `is_last`, until that returns something true; False when the bus was closed before."""
    async with bus.subscribe(subjects.of("live", service, instance)) as beats:
        async for message in beats:
            with contextlib.suppress(MalformedMessageError):  # any client may publish here
                if is_last(decode(Live, message.subject, message.payload)):
                    return True
    return False


# --- heartbeats


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """The newest heartbeat of one process."""

    live: Live
    heard_s: float
    """When it was received, on the caller's clock."""

    def is_late(self, now_s: float) -> bool:
        """Whether the next heartbeat is overdue."""
        return now_s - self.heard_s > LATE_AFTER_S


class Heartbeats:
    """The newest heartbeat of every process, by service and instance."""

    def __init__(self) -> None:
        self._beats: dict[tuple[str, str], Heartbeat] = {}

    def record(self, live: Live, now_s: float) -> None:
        """Store a heartbeat that was received at `now_s`."""
        self._beats[live.service, live.instance] = Heartbeat(live=live, heard_s=now_s)

    def recent(self, now_s: float) -> list[Heartbeat]:
        """The heartbeats of the last minute, sorted; late ones only of the services in `SERVICES`."""
        return [
            beat
            for (service, _), beat in sorted(self._beats.items())
            if now_s - beat.heard_s <= KEPT_S and (service in SERVICES or not beat.is_late(now_s))
        ]

    def document(self, now_s: float) -> list[dict[str, Any]]:
        """The recent heartbeats, for JSON."""
        return [
            {**msgspec.structs.asdict(beat.live), "heard_s_ago": now_s - beat.heard_s, "late": beat.is_late(now_s)}
            for beat in self.recent(now_s)
        ]

    def missing(self, now_s: float) -> list[str]:
        """Services in `SERVICES` without a heartbeat that is in time."""
        heard = {beat.live.service for beat in self.recent(now_s) if not beat.is_late(now_s)}
        return [service for service in SERVICES if service not in heard]

    def count(self, *names: str, now_s: float) -> int:
        """Sum of these counters over all processes."""
        return sum(beat.live.counters.get(name, 0) for beat in self.recent(now_s) for name in names)
