"""The services as child processes of a command: they get the broker's address, and end when the command ends."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from typing import IO

from dynamix.runtime.bus import Bus
from dynamix.runtime.embedded import DIE_WITH_PARENT
from dynamix.runtime.settings import BusSettings
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Live

SERVICES = ("collector", "reward", "arbitrator")
"""The services that steer a job: without a heartbeat of each, none is steered."""
STOP_TIMEOUT_S = 10.0
NATS_VARIABLES = "DYNAMIX_NATS_"


def bus_environment(settings: BusSettings) -> dict[str, str]:
    """The broker's address and credentials as environment variables: arguments would show them to the whole machine."""
    fields = {name: str(getattr(settings, name)) for name in settings.__struct_fields__}
    return {f"DYNAMIX_NATS_{name.upper()}": value for name, value in fields.items() if value}


class ServiceProcess:
    """One service in a process of its own."""

    def __init__(self, name: str, environ: Mapping[str, str], output: IO[bytes] | int | None = None) -> None:
        """Prepare `python -m dynamix.<name>` with `environ` added to ours; `output` takes its log (None: ours)."""
        self.name = name
        # What a deployment left in our environment is for another broker than the one that is given.
        foreign = NATS_VARIABLES if any(name.startswith(NATS_VARIABLES) for name in environ) else ()
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
    bus: Bus, is_last: Callable[[Live], bool], service: str = subjects.ANY, instance: str = subjects.ANY
) -> bool:
    """Hand every heartbeat to `is_last`, until that returns True; False when the bus was closed before."""
    async with bus.subscribe(subjects.of("live", service, instance)) as beats:
        async for message in beats:
            with contextlib.suppress(MalformedMessageError):  # any client may publish here
                if is_last(decode(Live, message.subject, message.payload)):
                    return True
    return False
