"""What the reward service and the collector consumed and published, chosen from a capture."""

from dynamix.collector.observing import Observation
from dynamix.collector.probes import Traffic
from dynamix.recording.capture import Record
from dynamix.runtime.bus import BusMessage
from dynamix.schemas.codec import MalformedMessageError, decode
from dynamix.schemas.messages import MetricWindow, Report

from .bus import message_of
from .counts import Tally
from .errors import ReplayError
from .player import Tape
from .position import Place, identity_of, kind_of, place_of

READ_ON_WINDOWS = 3
"""Behind the last wanted window: no rank is further ahead than this, since each window ends at a barrier."""
MAX_HELD = 10_000
"""Reports that wait for what the collector made of them."""


class Until:
    """The last wanted window; ends the tape behind it."""

    def __init__(self, tape: Tape, last: Place | None) -> None:
        self._tape = tape
        self._last = last

    def wants(self, record: Record) -> bool:
        """Whether a record is about a wanted window; one that is about none is."""
        if self._last is None or (place := place_of(identity_of(record))) is None:
            return True
        if place > self._last._replace(window=self._last.window + READ_ON_WINDOWS):
            self._tape.end()
        return place <= self._last


class Windows:
    """The reward service: metric windows in, rewards out."""

    def __init__(self, until: Until) -> None:
        self._until = until

    def take(self, record: Record) -> list[BusMessage]:
        """Each window as it comes."""
        return [message_of(record)] if kind_of(record) == "window" and self._until.wants(record) else []

    def outputs(self, record: Record) -> list[Record]:
        """Rewards."""
        return [record] if kind_of(record) == "reward" and self._until.wants(record) else []


class Reports:
    """The collector: reports in, metric windows and states out.

    What the kernel said cannot be asked again: it is taken from the recorded window, and a report is delivered once
    that is known (a virtual cluster's says all itself). A collector whose stream is full gives up windows, never
    states: such a state cannot be made again, and is not compared.
    """

    def __init__(self, until: Until, tally: Tally) -> None:
        self._until = until
        self._tally = tally
        self._held: dict[str, list[Record]] = {}
        """A report, and its state if that came before the window, by what follows the kind in their identity."""
        self._seen: dict[tuple[str, Place], MetricWindow] = {}
        """Windows whose report is delivered, by node."""

    def take(self, record: Record) -> list[BusMessage]:
        """A report whose window is known now."""
        kind = kind_of(record)
        if kind not in ("report", "window") or not self._until.wants(record):
            return []
        return self._report(record) if kind == "report" else self._window(record)

    def outputs(self, record: Record) -> list[Record]:
        """A state whose window is known; a window, and its state if that came first. Called before `take`."""
        kind = kind_of(record)
        if kind not in ("window", "state") or not self._until.wants(record):
            return []
        held = self._held.get(_about(record))
        if kind == "window":
            return [record, *(held or ())[1:]]
        if held is None:
            return [record]
        held.append(record)
        return []

    def observe(self, report: Report, *, fresh: bool) -> Observation:  # noqa: ARG002 - what was recorded does not age
        """What the recorded collector saw of the processes in a report."""
        window = self._seen.pop((report.node, Place(report.generation, report.window)), None)
        if window is None:
            raise ReplayError(
                f"a report of node {report.node!r} was delivered before its window: the capture is not one of ours"
            )
        return observation_in(window)

    def finish(self) -> None:
        """Count what hangs on windows that are not there."""
        self._tally.num_outside += sum(len(held) for held in self._held.values())
        self._held.clear()

    def _report(self, record: Record) -> list[BusMessage]:
        self._held.setdefault(_about(record), [record])
        if len(self._held) > MAX_HELD:
            self._tally.num_outside += len(self._held.pop(next(iter(self._held))))
        return []

    def _window(self, record: Record) -> list[BusMessage]:
        held = self._held.pop(_about(record), None)
        if held is None:
            return []
        try:
            window = decode(MetricWindow, record.subject, record.payload)
        except MalformedMessageError as error:
            self._tally.note(f"the window at {record.sequence} cannot be decoded ({error}): nothing can be made of it")
            return []
        self._seen[window.node, Place(window.generation, window.window)] = window
        if len(self._seen) > MAX_HELD:
            self._seen.pop(next(iter(self._seen)))  # of a virtual cluster: nobody asks for it
        return [message_of(held[0])]


def observation_in(window: MetricWindow) -> Observation:
    """The kernel's part of a metric window, as it went in; the interval is in the node's metrics already."""
    by_rank = {rank.rank: rank.network for rank in window.ranks if rank.network is not None}
    return Observation(
        systems={rank.rank: rank.system for rank in window.ranks},
        node=window.node_metrics,
        network=Traffic(window.probe, by_rank, None, window.probe_note),
        num_readings_lost=window.num_readings_lost,
        refused_pids=window.refused_pids,
    )


def _about(record: Record) -> str:
    return identity_of(record).partition(":")[2]
