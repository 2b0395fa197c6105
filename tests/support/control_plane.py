"""A broker with its streams and real service processes, and a made-up trainer that feeds them."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from typing import IO, Any

from tests.support import examples
from tests.support.bus_watch import stored_messages
from tests.support.reading import read

from dynamix.cli.services import ServiceProcess, bus_environment, wait_until_ready
from dynamix.collector.procfs import Proc
from dynamix.runtime.bus import Bus
from dynamix.runtime.bus.provision import provision
from dynamix.runtime.embedded import EmbeddedServer
from dynamix.schemas import subjects
from dynamix.schemas.codec import decode_any
from dynamix.schemas.messages import Action, Job, Message, Report
from dynamix.schemas.streams import ACTIONS

NODE = "node-a"


class ControlPlane:
    """Handles on everything that runs."""

    def __init__(self, server: EmbeddedServer, bus: Bus) -> None:
        self.server = server
        self.bus = bus
        self.services: dict[str, ServiceProcess] = {}
        self.environ = {**bus_environment(server.settings), "DYNAMIX_NODE": NODE, "DYNAMIX_COLLECTOR_PROBE": "tcp_info"}

    async def start(self, *names: str, output: IO[bytes] | None = None, **environ: str) -> None:
        """Start services (again) and wait until they listen; `output` takes their logs."""
        for name in names:
            self.services[name] = ServiceProcess(name, {**self.environ, **environ}, output)
            self.services[name].start()
        await wait_until_ready(self.bus, names, 180.0)

    def another(self, name: str, environ: Mapping[str, str]) -> ServiceProcess:
        """A further process of a service, not started."""
        return ServiceProcess(name, {**self.environ, **environ})

    async def messages(self, stream: str, subject: str) -> list[Message]:
        """All messages that are stored on a subject now, in order."""
        return [decode_any(one.subject, one.payload) for one in await stored_messages(self.bus, stream, subject)]

    async def wait_for(self, stream: str, subject: str, count: int) -> list[Message]:
        """The first `count` messages on a subject, once they are there."""
        async with self.bus.consume(stream, [subject], start="all") as consumer:
            return [decode_any(one.subject, one.payload) for one in await read(consumer, count)]

    async def wait_for_actions(self, count: int, job: str = examples.JOB) -> list[Action]:
        """The job's first actions, once there are `count`."""
        return await self.wait_for(ACTIONS.name, subjects.of("action", job), count)  # type: ignore[return-value]


@contextlib.asynccontextmanager
async def control_plane(*services: str) -> AsyncIterator[ControlPlane]:
    """A broker, provisioned, with these services running."""
    async with EmbeddedServer() as server:
        bus = await Bus.connect(server.settings, name="test")
        plane = ControlPlane(server, bus)
        try:
            await provision(bus)
            await plane.start(*services)
            yield plane
        finally:
            for service in plane.services.values():
                service.stop()
            await bus.close()


def one_node_job(**changes: Any) -> Job:
    """Four ranks on the node of the control plane."""
    return examples.job({NODE: (0, 1, 2, 3)}, **changes)


def report_of(job: Job, window: int, sizes: tuple[int, ...], throughput: tuple[float, ...]) -> Report:
    """What four ranks with the given compute throughput report of a window; their pid is this very process."""
    pid = os.getpid()
    k = job.window_steps
    times = [size / speed for size, speed in zip(sizes, throughput, strict=True)]
    rows = tuple(
        examples.row(
            rank,
            pid=pid,
            pid_start_ticks=Proc().stat(pid).start_ticks,
            pid_namespace=Proc().owner(pid)[1],
            uid=os.getuid(),
            local_batch_size=size,
            pending_local_batch_size=size,
            num_samples=size * k,
            loss_sum=size * k * 0.5,
            num_correct=size * k * 0.75,
            compute_time_s=times[rank] * k,
            sync_time_s=(max(times) - times[rank]) * k,
            sockets=examples.sockets(1000 * (window + 1), 1000 * (window + 1)),
            sockets_before=examples.sockets(1000 * window, 1000 * window),
        )
        for rank, size in enumerate(sizes)
    )
    return examples.report(
        NODE,
        window=window,
        job=job.job,
        generation=job.generation,
        rows=rows,
        totals=examples.totals(window, global_batch_size=sum(sizes), num_samples=sum(sizes) * k, time_s=max(times) * k),
    )


async def feed_windows(plane: ControlPlane, job: Job, windows: range, every_s: float = 0.04) -> None:
    """Report windows at a steady pace, as a job does that never waits; throughput wanders a little."""
    for window in windows:
        speeds = tuple(1000.0 * (3 - rank % 3) + 40 * ((window * 7 + rank * 13) % 11) for rank in range(4))
        await plane.bus.publish_soon(report_of(job, window, (128,) * 4, speeds))
        await asyncio.sleep(every_s)
