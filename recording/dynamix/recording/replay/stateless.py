"""The bus of the collector and of the reward service, whose outputs each follow from one message."""

import asyncio
from typing import Protocol

from dynamix.collector.probes import Traffic
from dynamix.collector.window import Observation
from dynamix.recording.capture import Record, WindowKey
from dynamix.recording.capture.record import identity_of, kind_of, window_key_of
from dynamix.recording.comparison import OutputCounts, OutputPairing
from dynamix.recording.playback import RecordPlayer, ReplayedConsumer, ReplayError, acknowledgement, bus_message_of
from dynamix.runtime.bus import BusMessage
from dynamix.runtime.bus.read import StatisticsByKind
from dynamix.schemas import codec, subjects
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import Message, MetricWindow, Report
from dynamix.schemas.subjects import ROOT

READ_ON_WINDOWS = 3
"""Windows read after the last requested one: no rank is further ahead, since each window ends at a barrier."""
MAX_PENDING = 10_000
"""Reports that wait for the window that the collector made of them."""
_DEAD = f"{ROOT}.dead."


class ServiceTraffic(Protocol):
    """Chooses from the records what a service consumed and what it published."""

    def inputs_of(self, record: Record) -> list[BusMessage]:
        """Messages to deliver now that this record was read."""

    def outputs_of(self, record: Record) -> list[Record]:
        """Outputs of the recorded service, to compare once the inputs are handled. Called before `inputs_of`."""


class StatelessReplayBus:
    """A bus that delivers recorded inputs and compares what is published with the recorded outputs."""

    def __init__(self, player: RecordPlayer, traffic: ServiceTraffic, pairing: OutputPairing) -> None:
        self.statistics = StatisticsByKind()
        self._player = player
        self._traffic = traffic
        self._pairing = pairing
        self._outputs: list[Record] = []
        """Recorded outputs that were read together with the batch that is being handled."""

    def consume(self, *_: object, **__: object) -> ReplayedConsumer:
        """Consume the service's inputs from the beginning of the capture, as `ServiceTraffic` chooses them."""
        return ReplayedConsumer(self._next_batch)

    async def _next_batch(self) -> list[BusMessage]:
        """Read up to the next inputs; the outputs of the previous ones are published by now, and compared."""
        self._compare_outputs()
        batch: list[BusMessage] = []
        while not batch and (records := await self._player.next_records()):
            for record in records:
                self._outputs += self._traffic.outputs_of(record)
                batch += self._traffic.inputs_of(record)
            if not batch:
                self._compare_outputs()
        return batch

    async def publish(self, message: Message) -> int:
        """Add an output to the comparison; returns 0, since nothing is stored."""
        payload, identity = codec.encode(message), codec.message_id(message)
        return await (await self.publish_bytes_soon(subjects.subject_of(message), payload, identity))

    async def publish_bytes_soon(self, subject: str, payload: bytes, message_id: str) -> asyncio.Future[int]:
        """Add an output to the comparison, unless it is a dead letter; the service counts those."""
        if not subject.startswith(_DEAD):
            self._pairing.add_replayed(message_id, subject, payload)
        return acknowledgement(0)

    def _compare_outputs(self) -> None:
        for record in self._outputs:
            self._pairing.add_recorded(record)
        self._outputs.clear()


class WindowLimit:
    """The last requested window; ends the playback after it."""

    def __init__(self, player: RecordPlayer, last: WindowKey | None) -> None:
        self._player = player
        self._last = last

    def includes(self, record: Record) -> bool:
        """Whether a record is about a requested window, or about no window."""
        if self._last is None or (key := window_key_of(identity_of(record))) is None:
            return True
        if key > self._last._replace(window=self._last.window + READ_ON_WINDOWS):
            self._player.end()
        return key <= self._last


class RewardTraffic:
    """Traffic of the reward service: metric windows in, rewards out."""

    def __init__(self, limit: WindowLimit) -> None:
        self._limit = limit

    def inputs_of(self, record: Record) -> list[BusMessage]:
        """Return each metric window."""
        return [bus_message_of(record)] if kind_of(record) == "window" and self._limit.includes(record) else []

    def outputs_of(self, record: Record) -> list[Record]:
        """Return each reward."""
        return [record] if kind_of(record) == "reward" and self._limit.includes(record) else []


class CollectorTraffic:
    """Traffic of the collector: reports in, metric windows and states out, and where agents rule their traces.

    Kernel counters cannot be read again. They are taken from the recorded window, so a report is delivered once its
    window was read. (A report of a virtual cluster carries all counters itself.) A collector drops windows, never
    states, while its stream is full; what else it made of a dropped window cannot be made again, and is not compared.
    """

    def __init__(self, limit: WindowLimit, counts: OutputCounts) -> None:
        self._limit = limit
        self._counts = counts
        self._pending: dict[str, list[Record]] = {}
        """A report, and its state and trace if they came before the window, by the part of their identity after the
        kind.
        """
        self._windows: dict[tuple[str, WindowKey], MetricWindow] = {}
        """Windows whose report is delivered, by node."""

    def inputs_of(self, record: Record) -> list[BusMessage]:
        """Return the report of a window that was read."""
        kind = kind_of(record)
        if kind not in ("report", "window") or not self._limit.includes(record):
            return []
        if kind == "window":
            return self._report_of(record)
        self._pending.setdefault(_node_window(record), [record])
        if len(self._pending) > MAX_PENDING:
            self._counts.num_uncompared += len(self._pending.pop(next(iter(self._pending)))) - 1
        return []

    def outputs_of(self, record: Record) -> list[Record]:
        """Return a state or a trace whose window was read; a window, with its state and trace if they came first."""
        kind = kind_of(record)
        if kind not in ("window", "state", "trace") or not self._limit.includes(record):
            return []
        pending = self._pending.get(_node_window(record))
        if kind == "window":
            return [record, *(pending or ())[1:]]
        if pending is None:
            return [record]
        pending.append(record)
        return []

    def observe(self, report: Report, *, fresh: bool) -> Observation:  # noqa: ARG002 - recorded counters do not age
        """Return what the recorded collector read of the processes in a report."""
        window = self._windows.pop((report.node, WindowKey(report.generation, report.window)), None)
        if window is None:
            raise ReplayError(
                f"a report of node {report.node!r} was delivered before its window: the capture is not one of ours"
            )
        return observation_in(window)

    def finish(self) -> None:
        """Count the states and traces of windows that are not in the capture."""
        self._counts.num_uncompared += sum(len(pending) - 1 for pending in self._pending.values())
        self._pending.clear()

    def _report_of(self, record: Record) -> list[BusMessage]:
        pending = self._pending.pop(_node_window(record), None)
        if pending is None:
            return []
        try:
            window = decode(MetricWindow, record.subject, record.payload)
        except MalformedMessageError as error:
            self._counts.add_note(f"the window at {record.sequence} cannot be decoded and is left out: {error}")
            return []
        self._windows[window.node, WindowKey(window.generation, window.window)] = window
        if len(self._windows) > MAX_PENDING:
            self._windows.pop(next(iter(self._windows)))  # of a virtual cluster: it is never observed
        return [bus_message_of(pending[0])]


def observation_in(window: MetricWindow) -> Observation:
    """Extract the kernel's part of a metric window; the node's metrics include the interval already."""
    by_rank = {rank.rank: rank.network for rank in window.ranks if rank.network is not None}
    return Observation(
        systems={rank.rank: rank.system for rank in window.ranks},
        node=window.node_metrics,
        network=Traffic(window.probe, by_rank, None, window.probe_note),
        num_readings_lost=window.num_readings_lost,
        refused_pids=window.refused_pids,
    )


def _node_window(record: Record) -> str:
    return identity_of(record).partition(":")[2]
