"""Embedded brokers with a configuration of the test's own, and handles on what can go wrong with them."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.requests import Answer
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.runtime.settings import BusSettings

STATE = "dynamix.v1.state.job.1.node-a"


class ConfiguredServer(EmbeddedServer):
    """An embedded server with other users (a nats.conf block) and further lines of configuration."""

    def __init__(self, *, authorization: str = "", extra: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.authorization = authorization
        self.extra = extra

    def _config(self, store: Path) -> str:
        text = super()._config(store)
        if self.authorization:
            head, _, _ = text.partition("authorization {")
            text = f"{head}authorization {{ {self.authorization} }}\n"
        return text + self.extra + "\n"

    def reload(self) -> None:
        """Write the configuration again and let the running server read it."""
        self._write_config()
        os.kill(self.pid, signal.SIGHUP)

    def pause(self) -> None:
        """Let the server neither answer nor die once this returns: its threads stop some time after the signal."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        while any(_state_of(task) != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def user(self, user: str, password: str) -> BusSettings:
        return BusSettings(url=self.settings.url, user=user, password=password)


@contextlib.asynccontextmanager
async def connected(settings: BusSettings, name: str = "test", **options: Any) -> AsyncIterator[Bus]:
    """A bus that is closed at the end."""
    bus = await Bus.connect(settings, name=name, **options)
    try:
        yield bus
    finally:
        await bus.close()


def _state_of(task: Path) -> str:
    """A thread's state, as a letter; stopped for one that has ended meanwhile."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"


async def until(condition: Callable[[], object], timeout_s: float = 120.0) -> None:
    """Wait for what no event tells."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)


class _Names(Answer):
    consumers: list[str] | None = None


async def consumer_names(bus: Bus, stream: str) -> list[str]:
    """What the broker keeps for readers of a stream."""
    return (await bus.requests.ask(f"CONSUMER.NAMES.{stream}", {}, _Names)).consumers or []


async def operate(bus: Bus, operation: str) -> None:
    """Ask JetStream's API for what no service asks."""
    await bus.requests.ask(operation, None, Answer)


async def publish_unstored(bus: Bus, subject: str, payload: bytes) -> None:
    """Publish on core NATS."""
    assert await bus._connection.send(subject, payload)


async def publish_states(bus: Bus, numbers: range, subject: str = STATE) -> None:
    """Store messages whose payload is their number."""
    futures = [await bus.publish_bytes_soon(subject, b"%d" % number, f"{subject}:{number}") for number in numbers]
    await asyncio.gather(*futures)
