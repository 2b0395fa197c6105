"""The shell of the collector: consume this node's reports, publish metric windows, states, and its agent's traces.

One task reads reports, which wait for the turns of their jobs. While a flood of others lies before them in the broker,
another task asks for the newest reports of the jobs that train here. Reports are handled one by one; for each a task
waits until its outputs are stored.
"""

import asyncio
from collections.abc import Sequence

from dynamix.runtime.bus import BusError, BusMessage, Reader, StreamFullError
from dynamix.runtime.service import Context, StartError
from dynamix.schemas import subjects
from dynamix.schemas.codec import MalformedMessageError, decode, parcel_of
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Message, MetricWindow, Report, State
from dynamix.schemas.streams import REPORTS

from .agent import trace_of
from .ebpf.probe import SocketProbe, open_probe
from .ebpf.syscall import ProbeError
from .observation import CollectorSettings, KernelObserver
from .shown import ShownWindows
from .turns import WaitingReports
from .window import metric_window, simulated_window

READ_SHARE = 1.0
"""While the broker has more, reading goes on after each report for so many times as long as that took: what is pressing
may lie behind megabytes that the broker has sent already."""
MAX_UNSTORED = 64
"""Reports whose outputs may be in flight: the broker stores the outputs of the next one behind theirs."""
ACK_EVERY_S = 0.1
BEHIND = 64
"""Reports left in the broker from which those of jobs that train here are requested by their subjects."""
ASK_EVERY_S = 0.02
NUM_ASKED_AT_ONCE = 16

InFlight = tuple[Message, asyncio.Future[int]]


async def serve(context: Context[CollectorSettings]) -> None:
    """Turn every report of this node into a metric window and a state until the context stops.

    Raises:
        StartError: when the settings insist on eBPF and it cannot be had.
    """
    settings = context.settings
    probe: SocketProbe | str = "not wanted: see DYNAMIX_COLLECTOR_PROBE"
    if settings.probe in ("auto", "ebpf"):
        try:
            probe = await asyncio.to_thread(open_probe, settings.cgroup)
            context.log.info("eBPF probe attached")
        except ProbeError as error:
            if settings.probe == "ebpf":
                what = f"DYNAMIX_COLLECTOR_PROBE=ebpf: {error}; `dynamix doctor` says how to get it"
                raise StartError(what) from error
            context.log.info("no eBPF probe; TCP_INFO and /proc serve", reason=str(error))
            probe = "not available: see `dynamix doctor`"
    context.counters["ebpf"] = int(isinstance(probe, SocketProbe))
    try:
        collector = _Collector(context, probe)
        reports = subjects.of("report", subjects.ANY, context.node)
        durable = f"collector-{context.node}"
        async with context.bus.consume(REPORTS.name, [reports], start="new", durable=durable) as consumer:
            context.counters["ready"] = 1
            await collector.work(consumer)
    finally:
        if isinstance(probe, SocketProbe):
            probe.close()


class _Collector:
    def __init__(self, context: Context[CollectorSettings], probe: SocketProbe | str) -> None:
        self._context = context
        self._observer = KernelObserver(context, probe)
        self._shown = ShownWindows(context.metrics, probe if isinstance(probe, SocketProbe) else None)
        self._waiting = WaitingReports()
        self._unstored = asyncio.Semaphore(MAX_UNSTORED)
        self._has_changed, self._has_room = asyncio.Event(), asyncio.Event()
        self._num_pending = 0
        """Reports that the broker still held for us when it sent the last one."""
        self._is_behind = asyncio.Event()
        self._is_over = False

    async def work(self, consumer: Reader) -> None:
        """Read, and handle what was read in turns of all jobs, until the consumer ends.

        Raises:
            ExceptionGroup: of what ended the service, such as an output that cannot be stored.
        """
        loop, ack_at = asyncio.get_running_loop(), 0.0
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(consumer))
            asking = tasks.create_task(self._ask_for_newest())
            while not self._is_over:  # what waits for its turn at the end comes again after a restart
                if not self._waiting or loop.time() >= ack_at:
                    await self._acknowledge(consumer)
                    ack_at = loop.time() + ACK_EVERY_S
                if not self._waiting:
                    self._has_changed.clear()
                    await self._has_changed.wait()
                    continue
                await self._unstored.acquire()
                begun, (message, is_newest) = loop.time(), self._waiting.take()
                # only its job's newest is recent enough to read /proc for
                outputs = await self._collect(message, fresh=is_newest and not self._num_pending)
                tasks.create_task(self._finish(message, outputs))
                await asyncio.sleep(READ_SHARE * (loop.time() - begun) if self._num_pending else 0)
            asking.cancel()
        await self._acknowledge(consumer)

    async def _acknowledge(self, consumer: Reader) -> None:
        if (last := self._waiting.acknowledge()) is not None:
            await consumer.ack(last)
            self._has_room.set()

    async def _finish(self, message: BusMessage, outputs: Sequence[InFlight]) -> None:
        """Wait until the outputs of a report are stored; it comes again when the service is to stop before.

        When FEED is full, states are retried; metric windows and traces, of which there are newer ones soon, dropped.
        """
        are_stored = True
        for output, acknowledged in outputs:
            try:
                await acknowledged
            except StreamFullError:
                if isinstance(output, State):
                    are_stored = are_stored and await self._context.publish_when_room(output)
                else:
                    self._context.count("windows_shed" if isinstance(output, MetricWindow) else "traces_shed")
        if are_stored:
            self._waiting.finish(message)
        self._unstored.release()
        self._has_changed.set()

    async def _read(self, consumer: Reader) -> None:
        try:
            async for batch in consumer:
                self._waiting.add(batch)
                self._num_pending = self._context.counters["reports_pending"] = batch[-1].num_pending
                if self._num_pending >= BEHIND:
                    self._is_behind.set()
                else:
                    self._is_behind.clear()
                self._has_changed.set()
                while not self._waiting.has_room:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._is_over = True
            self._has_changed.set()

    async def _ask_for_newest(self) -> None:
        """While many reports wait in the broker, have the newest ones of jobs that train here handled before them."""
        while True:
            await self._is_behind.wait()
            wanted = self._waiting.training_with_less_than(BEHIND)
            try:
                for begin in range(0, len(wanted), NUM_ASKED_AT_ONCE):
                    some = wanted[begin : begin + NUM_ASKED_AT_ONCE]
                    for newest in await asyncio.gather(*(self._context.bus.newest(REPORTS.name, one) for one in some)):
                        if newest is not None:
                            self._waiting.add_early(newest)
                    self._has_changed.set()
                await asyncio.sleep(ASK_EVERY_S)
            except BusError as error:
                self._context.log.warning("a flood of reports delays all jobs of this node", reason=str(error))
                await asyncio.sleep(1)

    async def _collect(self, message: BusMessage, *, fresh: bool) -> list[InFlight]:
        """Put window, state and trace of a report in flight; nothing of what is no report, which is set aside.

        A well-formed report may give numbers that no message can hold.
        """
        try:
            report = decode(Report, message.subject, message.payload)
            self._waiting.note_training(message.subject)
            window = await self._window(report, fresh=fresh)
            trace = trace_of(report)
            outputs: tuple[Message, ...] = (window, state_of(window), *(() if trace is None else (trace,)))
            parcels = [parcel_of(output) for output in outputs]
        except (MalformedMessageError, OverflowError) as error:
            await self._context.dead_letter(message, str(error))
            return []
        self._context.count("windows")
        self._shown.record(window)
        send = self._context.bus.publish_bytes_soon
        return [(output, await send(*parcel)) for output, parcel in zip(outputs, parcels, strict=True)]

    async def _window(self, report: Report, *, fresh: bool) -> MetricWindow:
        """The window of a report; what is read of the kernel is read in a thread.

        8 ranks of 300 threads each take 44 ms. A cancelled caller waits for the thread, since the probe is closed next.
        """
        if report.simulated:
            return simulated_window(report, self._context.settings.probe)

        def observed() -> MetricWindow:
            return metric_window(report, self._observer.observe(report, fresh=fresh))

        if not fresh:
            return observed()
        reading = asyncio.create_task(asyncio.to_thread(observed))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.gather(reading, return_exceptions=True)
            raise
