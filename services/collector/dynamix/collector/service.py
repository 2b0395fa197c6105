"""The shell of the collector: consume this node's reports, publish metric windows and states."""

import asyncio
import itertools

from dynamix.runtime.bus import Message, StreamFullError
from dynamix.runtime.patience import publish_when_room
from dynamix.runtime.service import Context, StartError
from dynamix.schemas import subjects, table
from dynamix.schemas.codec import MalformedMessageError, decode, encode
from dynamix.schemas.features import state_of
from dynamix.schemas.messages import Message as SchemaMessage
from dynamix.schemas.messages import MetricWindow, NodeMetrics, RankRow, Report
from dynamix.schemas.streams import FEED

from .ebpf.opening import open_probe
from .ebpf.probe import SocketProbe
from .ebpf.traffic import KernelWindow, SocketTraffic
from .errors import ProbeError
from .intervals import WindowId
from .probes import Evidence, read_network
from .proc import Proc
from .readings import Readings
from .settings import CollectorSettings
from .simulated import simulated_window
from .trust import reason_to_refuse
from .window import metric_window

_InFlight = tuple[SchemaMessage, asyncio.Future[int]]

MOST_SAID = 256
"""Different reasons in the log: whoever may send reports can name any pid."""


async def serve(context: Context[CollectorSettings]) -> None:
    """Turn every report of this node into a metric window and a state until the context stops.

    Raises:
        StartError: when the settings insist on eBPF and it cannot be had.
    """
    probe = await asyncio.to_thread(_open_probe, context)
    context.counters["ebpf"] = int(isinstance(probe, SocketProbe))
    try:
        await _serve(context, _Collector(context, probe))
    finally:
        if isinstance(probe, SocketProbe):
            probe.close()


def _open_probe(context: Context[CollectorSettings]) -> SocketProbe | str:
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
    context.log.info("eBPF probe attached", leftovers_removed=probe.leftovers_removed)
    return probe


async def _serve(context: Context[CollectorSettings], collector: "_Collector") -> None:
    reports = subjects.report(subjects.ANY, context.node)
    durable = f"collector-{context.node}"
    async with context.bus.consume(FEED.name, [reports], start="new", durable=durable) as consumer:
        context.counters["ready"] = 1
        async for batch in consumer:
            if not await collector.collect(batch):
                return
            await consumer.ack(batch[-1])


class _Collector:
    def __init__(self, context: Context[CollectorSettings], probe: SocketProbe | str) -> None:
        self._context = context
        self._kernel = probe if isinstance(probe, str) else SocketTraffic(probe)
        self._proc = Proc()
        self._readings = Readings(self._proc)
        self._said: set[str] = set()
        """Reasons already logged: a window comes every second."""
        self._num_readings_lost = 0

    async def collect(self, batch: list[Message]) -> bool:
        """Publish what a batch of reports gives; only each job's newest report is recent enough to be read against.

        False when the service is to stop before all states could be stored.
        """
        reports = [(message, report) for message in batch if (report := await self._report(message)) is not None]
        newest = {report.job: report for _, report in reports}
        current = batch[-1].num_pending == 0
        stored = [await self._publish(m, r, fresh=current and newest[r.job] is r) for m, r in reports]
        return all([await self._stored(*output) for output in itertools.chain.from_iterable(stored)])

    async def _report(self, message: Message) -> Report | None:
        try:
            return decode(Report, message.subject, message.payload)
        except MalformedMessageError as error:
            await self._context.dead_letter(message, str(error))
            return None

    async def _publish(self, message: Message, report: Report, *, fresh: bool) -> list[_InFlight]:
        """Put window and state in flight. A well-formed report may still give numbers that no message can hold."""
        try:
            window = await self._without_blocking(report, fresh=fresh)
            outputs: tuple[SchemaMessage, ...] = (window, state_of(window))
            for output in outputs:
                decode(type(output), table.subject_of(output), encode(output))
        except (MalformedMessageError, OverflowError) as error:
            await self._context.dead_letter(message, str(error))
            return []
        self._context.count("windows")
        return [(output, await self._context.bus.publish_soon(output)) for output in outputs]

    async def _stored(self, output: SchemaMessage, acknowledged: asyncio.Future[int]) -> bool:
        """Where FEED has no room, a window is given up, which only informs; a state waits, which decides."""
        try:
            await acknowledged
        except StreamFullError:
            if not isinstance(output, MetricWindow):
                return await publish_when_room(self._context, output)
            self._context.count("windows_shed")
        return True

    async def _without_blocking(self, report: Report, *, fresh: bool) -> MetricWindow:
        """The window of a report; what is read of the kernel is read in a thread.

        8 ranks of 300 threads each take 44 ms. Who is cancelled waits for the thread: the probe is closed behind it.
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
        """A report that waited is not read against: what /proc says now is not of its window."""
        if report.simulated:
            return simulated_window(report, self._context.settings.probe)
        believed = [row for row in report.rows if self._believes(row)] if fresh else []
        at = WindowId(report.job, report.generation, report.window)
        processes = {row.pid: row for row in believed}  # each once, however many rows name it
        read = {pid: self._readings.process(row, at) for pid, row in processes.items()}
        systems = {row.rank: read[row.pid] for row in believed}
        node = self._readings.node(believed[0] if believed else None, at) if fresh else NodeMetrics()
        if node.interval_s is None and report.window > 0:
            self._num_readings_lost += 1
        evidence = Evidence(report, node, self._kernel_window(report, fresh=fresh, believed=believed))
        network = read_network(evidence, self._context.settings.probe)
        refused = tuple(row.pid for row in report.rows if fresh and row.rank not in systems)
        return metric_window(
            report,
            systems=systems,
            node=node,
            network=network,
            num_readings_lost=self._num_readings_lost,
            refused_pids=refused,
        )

    def _kernel_window(self, report: Report, *, fresh: bool, believed: list[RankRow]) -> KernelWindow | str:
        if isinstance(self._kernel, str):
            return self._kernel
        if not fresh:
            return "the report came late"
        if len(believed) < len(report.rows):
            return "a process is not believed: see refused_pids"
        return self._kernel.window(report)

    def _believes(self, row: RankRow) -> bool:
        reason = reason_to_refuse(row, self._proc, self._context.settings.uids)
        if reason is None:
            return True
        self._context.count("refused_pids")
        if reason not in self._said and len(self._said) < MOST_SAID:
            self._said.add(reason)
            self._context.log.warning("a reported process is not read", rank=row.rank, reason=reason)
        return False
