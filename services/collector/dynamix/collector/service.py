"""The shell of the collector: consume this node's reports, publish metric windows, states, and its agent's traces."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dynamix.runtime.bus import BusError, BusMessage
from dynamix.runtime.bus.service_bus import BatchConsumer, ServiceBus
from dynamix.runtime.bus.streams.following import Overtaking
from dynamix.runtime.rate_limit import RateLimit
from dynamix.runtime.service import Context, StartError
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode, encode, message_id
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Message, MetricWindow, Report
from dynamix.schemas.networks.files import NetworkFileError
from dynamix.schemas.streams import FEED

from .agent import Chooser, trace_of
from .agent_network import AgentNetwork
from .ebpf.probe import SocketProbe, open_probe
from .ebpf.syscall import ProbeError
from .observation import CollectorSettings, KernelObserver, Observer
from .shown import ShownWindows
from .turns import LARGE_BYTES, WaitingReport, WaitingReports
from .unstored import InFlight, UnstoredOutputs
from .window import metric_window, simulated_window

READ_ON_S = 0.01
"""Reading goes on for so long between two reports while the broker has more: all jobs take turns, not only the first.
What is pressing ends it, so that a job that trains does not wait while those are read that send without a pause."""
READ_ON_SHARE = 4.0
"""The same before a report above `LARGE_BYTES`, over the time that the last such one took: what is pressing may lie
behind many of them in the broker, and each that is handled before takes processor time from reading."""

NUM_POLLS = 8
"""Rounds of the event loop from the socket over client and consumer to the one who reads, some 5 us each, and spare."""


BEHIND = 64
"""With more than so many messages ahead of it in the broker, a report of a job that trains is looked up by itself."""
NAME_TOKEN = 3
"""Place of a job's name in a subject."""
MAX_RUNS, MAX_NAMES = 4, 200
"""Runs of a job's name that are known to train here, and names."""


class CollectorBus(ServiceBus, Protocol):
    """What a collector uses of the bus."""

    def overtake(self, stream: str, group_of: Callable[[str], str | None]) -> Overtaking:
        """Read the newest messages of watched subjects before all that waits."""


async def serve(context: Context[CollectorSettings, CollectorBus]) -> None:
    """Turn every report of this node into a metric window and a state until the context stops.

    Raises:
        StartError: when the settings insist on eBPF and it cannot be had, or name a file that is no network of agents.
    """
    probe = await asyncio.to_thread(_open_probe, context)
    context.counters["ebpf"] = int(isinstance(probe, SocketProbe))
    shown = ShownWindows(context.metrics, probe if isinstance(probe, SocketProbe) else None)
    try:
        await serve_observed(context, KernelObserver(context, probe), shown, overtake=context.bus.overtake)
    finally:
        if isinstance(probe, SocketProbe):
            probe.close()


async def serve_observed(
    context: Context[CollectorSettings, ServiceBus],
    observer: Observer,
    shown: ShownWindows | None = None,
    *,
    in_step: bool = False,
    overtake: Callable[[str, Callable[[str], str | None]], Overtaking] | None = None,
) -> None:
    """Turn every report into a metric window and a state, with what an observer sees of its processes.

    `in_step` is for a replay: everything that was read is handled before more is read, not beside it. By `overtake`
    reports of jobs that train are read before a flood of others.
    """
    choose = await asyncio.to_thread(_chooser, context.settings)
    collector = _Collector(context, observer, shown or ShownWindows(context.metrics), choose, in_step=in_step)
    reports = subjects.of("report", subjects.ANY, context.node)
    durable = f"collector-{context.node}"
    async with context.bus.consume(FEED.name, [reports], start="new", durable=durable) as consumer:
        context.counters["ready"] = 1
        if overtake is None:
            await collector.take_turns(consumer)
            return
        async with overtake(FEED.name, collector.name_of) as newest:
            overtaking = asyncio.create_task(collector.overtake(newest))
            try:
                await collector.take_turns(consumer)
            finally:
                overtaking.cancel()
                await asyncio.gather(overtaking, return_exceptions=True)


def _open_probe(context: Context[CollectorSettings, ServiceBus]) -> SocketProbe | str:
    """The eBPF probe, or why there is none."""
    settings = context.settings
    if settings.probe not in ("auto", "ebpf"):
        return "not wanted: see DYNAMIX_COLLECTOR_PROBE"
    try:
        probe = open_probe(settings.cgroup)
    except ProbeError as error:
        if settings.probe == "ebpf":
            raise StartError(f"DYNAMIX_COLLECTOR_PROBE=ebpf: {error}; `dynamix doctor` says how to get it") from error
        context.log.info("no eBPF probe; TCP_INFO and /proc serve", reason=str(error))
        return "not available: see `dynamix doctor`"
    context.log.info("eBPF probe attached", stale_programs_removed=probe.num_stale_removed)
    return probe


def _chooser(settings: CollectorSettings) -> Chooser | None:
    """What agents of jobs with the option `learned` decide by, where it is not the shipped network."""
    if not settings.agents:
        return None
    try:
        return AgentNetwork.read(Path(settings.agents)).factor
    except NetworkFileError as error:
        raise StartError(f"DYNAMIX_COLLECTOR_AGENTS={error}") from error


class _Collector:
    def __init__(
        self,
        context: Context[CollectorSettings, ServiceBus],
        observer: Observer,
        shown: ShownWindows,
        choose: Chooser | None = None,
        *,
        in_step: bool,
    ) -> None:
        self._context = context
        self._observer = observer
        self._shown = shown
        self._choose = choose
        self._in_step = in_step
        self._waiting = WaitingReports()
        self._unstored = UnstoredOutputs(context)
        self._limit = RateLimit(per_s=0.1)
        self._owed_s = 0.0
        """Reading that goes on before the next large report; what is pressing is handled in between."""
        self._num_pending = 0
        """What the broker still held for us when it sent what was read last."""
        self._newest: Overtaking | None = None
        self._training: dict[str, dict[str, None]] = {}
        """Subjects of good reports, by name of their jobs; both the newest last."""

    async def overtake(self, newest: Overtaking) -> None:
        """Read reports of jobs that train before those that wait in the broker, where these are many."""
        self._newest = newest
        try:
            async for message in newest:
                self._waiting.add_early(message)
        except BusError as error:
            self._context.log.warning("a flood of reports will delay all jobs of this node", reason=str(error))

    def name_of(self, subject: str) -> str | None:
        """The name of the job of a report, where many messages wait before it."""
        return subject.split(".")[NAME_TOKEN] if self._num_pending >= BEHIND else None

    async def _note_training(self, subject: str) -> None:
        """Watch the subject of a good report; of each name, and of all, those that reported last."""
        if self._newest is None:
            return
        name = subject.split(".")[NAME_TOKEN]
        runs = self._training.pop(name, {})
        runs.pop(subject, None)
        self._training[name] = runs | {subject: None}
        await self._newest.watch(subject)
        if len(self._training[name]) > MAX_RUNS:
            old = next(iter(self._training[name]))
            del self._training[name][old]
            await self._newest.forget(old)
        if len(self._training) > MAX_NAMES:
            for old in self._training.pop(next(iter(self._training))):
                await self._newest.forget(old)

    async def take_turns(self, consumer: BatchConsumer) -> None:
        """Read, and handle what was read in turns of all jobs, until the consumer ends or the service is to stop.

        After each report what has come meanwhile is read, so that one of a job that trains is next.
        """
        reading, loop = _ReadAhead(consumer), asyncio.get_running_loop()
        try:
            while await self._read(reading):
                if self._waiting:
                    begun, report = loop.time(), self._waiting.take()
                    self._unstored.add(report, await self.collect(report))
                    if len(report.message.payload) > LARGE_BYTES:
                        self._owed_s = READ_ON_SHARE * (loop.time() - begun)
                if not await self._settle(consumer, is_last=self._in_step):
                    return
            await self._settle(consumer, is_last=True)
        finally:
            await reading.close()

    async def _settle(self, consumer: BatchConsumer, *, is_last: bool) -> bool:
        """Acknowledge reports whose outputs are stored. False when the service is to stop before all states are."""
        unstored = self._unstored
        settled = await (unstored.settle_all() if is_last else unstored.settle_some(is_idle=not self._waiting))
        if not unstored.gave_up and (last := self._waiting.finish(settled)) is not None:
            await consumer.ack(last)
        return not unstored.gave_up

    async def _read(self, reading: "_ReadAhead") -> bool:
        """Wait for work; with work, take what is there, and go on for a while when there is more. False at the end."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while not self._waiting or (self._waiting.has_room and not self._in_step):
            until = begun + (max(READ_ON_S, self._owed_s) if self._waiting.next_bytes > LARGE_BYTES else READ_ON_S)
            if self._waiting:
                batch = await reading.next_batch(max(0.0, until - loop.time()) if self._num_pending else 0.0)
            else:
                batch = await reading.next_batch(None, self._unstored.awaited)
            if batch is None:
                return False
            is_pressing = self._waiting.add_messages(batch)
            if batch:
                self._num_pending = batch[-1].num_pending
                self._tell_of_crowds()
            if not batch or is_pressing or not self._num_pending or loop.time() >= until:
                break
        self._owed_s = max(0.0, self._owed_s - (loop.time() - begun)) if self._num_pending else 0.0
        return True

    def _tell_of_crowds(self) -> None:
        if self._waiting.num_passed_over == self._context.counters.get("reports_passed_over", 0):
            return
        self._context.counters["reports_passed_over"] = self._waiting.num_passed_over
        if self._limit.allow("crowd"):
            self._context.log.warning(
                "a job sends more reports than can be handled: its older ones are passed over",
                job=self._waiting.crowding_job,
                passed_over=self._waiting.num_passed_over,
            )

    async def collect(self, waiting: WaitingReport) -> list[InFlight]:
        """Publish what a report gives; only its job's newest is recent enough to read /proc for."""
        report = await self._report(waiting.message)
        if report is None:
            return []
        return await self._publish(waiting.message, report, fresh=waiting.is_newest and not self._num_pending)

    async def _report(self, message: BusMessage) -> Report | None:
        try:
            report = decode(Report, message.subject, message.payload)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))
            return None
        await self._note_training(message.subject)
        return report

    async def _publish(self, message: BusMessage, report: Report, *, fresh: bool) -> list[InFlight]:
        """Put window, state and trace in flight. A well-formed report may give numbers that no message can hold."""
        try:
            window = await self._without_blocking(report, fresh=fresh)
            trace = trace_of(report, self._choose)
            outputs: tuple[Message, ...] = (window, state_of(window), *(() if trace is None else (trace,)))
            packed = [_packed(output) for output in outputs]
        except (MalformedMessageError, OverflowError) as error:
            await self._context.dead_letter(message, str(error))
            return []
        self._context.count("windows")
        self._shown.record(window)
        send = self._context.bus.publish_bytes_soon
        return [(output, await send(*parcel)) for output, parcel in zip(outputs, packed, strict=True)]

    async def _without_blocking(self, report: Report, *, fresh: bool) -> MetricWindow:
        """The window of a report; what is read of the kernel is read in a thread.

        8 ranks of 300 threads each take 44 ms. A cancelled caller waits for the thread, since the probe is closed next.
        """
        if report.simulated or not fresh:
            return self._window(report, fresh=fresh)
        reading = asyncio.create_task(asyncio.to_thread(self._window, report, fresh=fresh))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.gather(reading, return_exceptions=True)
            raise

    def _window(self, report: Report, *, fresh: bool) -> MetricWindow:
        if report.simulated:
            return simulated_window(report, self._context.settings.probe)
        return metric_window(report, self._observer.observe(report, fresh=fresh))


class _ReadAhead:
    """Reads a consumer beside other work."""

    def __init__(self, consumer: BatchConsumer) -> None:
        self._consumer = consumer
        self._task: asyncio.Task[list[BusMessage] | None] | None = None

    async def next_batch(
        self, timeout_s: float | None, beside: asyncio.Future[int] | None = None
    ) -> list[BusMessage] | None:
        """The next batch; empty when none came in time, or before what is waited for beside it; `None` at the end.

        A batch that did not come is not lost: a later call returns it.
        """
        task = self._task = self._task or asyncio.create_task(self._next())
        if timeout_s == 0.0:
            await self._poll(task)
        awaited: list[asyncio.Future[Any]] = [task] if beside is None else [task, beside]
        await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return []
        self._task = None
        return task.result()

    async def _poll(self, task: asyncio.Task[list[BusMessage] | None]) -> None:
        """Let the loop run until what lies in the socket has become a batch, or would have."""
        for _ in range(NUM_POLLS):
            if task.done():
                return
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Read no more; what was read and not returned comes again after a restart."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _next(self) -> list[BusMessage] | None:
        return await anext(self._consumer, None)


def _packed(output: Message) -> tuple[str, bytes, str]:
    """Subject, bytes and identity. Raises MalformedMessageError or OverflowError when a reader would not take them."""
    subject, payload = subjects.subject_of(output), encode(output)
    decode(type(output), subject, payload)
    return subject, payload, message_id(output)
