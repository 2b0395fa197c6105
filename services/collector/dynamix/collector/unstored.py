"""Reports whose outputs are published and not stored yet: the next report is handled meanwhile, up to a limit."""

import asyncio
import collections
from collections.abc import Sequence
from typing import NamedTuple

from dynamix.runtime.bus import StreamFullError
from dynamix.runtime.bus.service_bus import ServiceBus
from dynamix.runtime.service import Context
from dynamix.schemas.messages import Message, MetricWindow, State

from .observation import CollectorSettings
from .turns import WaitingReport

MAX_UNSTORED = 64
"""Reports whose outputs may be in flight; with more, half of them are waited for."""
MAX_UNSTORED_BYTES = 4 << 20
"""The same in bytes of the reports: the broker stores the outputs of the next one behind theirs."""

InFlight = tuple[Message, asyncio.Future[int]]


class _Handled(NamedTuple):
    report: WaitingReport
    outputs: Sequence[InFlight]


class UnstoredOutputs:
    """Keeps reports in the order in which they were handled, until what they gave is stored.

    Attributes:
        gave_up: a state could not be stored before the service is to stop.
    """

    def __init__(self, context: Context[CollectorSettings, ServiceBus]) -> None:
        self.gave_up = False
        self._context = context
        self._handled: collections.deque[_Handled] = collections.deque()
        self._num_bytes = 0

    @property
    def awaited(self) -> asyncio.Future[int] | None:
        """What the first report waits for, done where that is stored already; `None` when there is nothing."""
        if not self._handled or not self._handled[0].outputs:
            return None
        futures = [future for _, future in self._handled[0].outputs]
        return next((future for future in futures if not future.done()), futures[-1])

    def add(self, report: WaitingReport, outputs: Sequence[InFlight]) -> None:
        """Keep a report, and what it gave, maybe nothing."""
        self._handled.append(_Handled(report, outputs))
        self._num_bytes += len(report.message.payload)

    async def settle_some(self, *, is_idle: bool) -> list[WaitingReport]:
        """The reports at the front that are done with: when idle those that are stored, else none up to the limit."""
        settled: list[WaitingReport] = []
        is_full = self._is_over(MAX_UNSTORED, MAX_UNSTORED_BYTES)
        while self._handled and (
            (is_idle and all(future.done() for _, future in self._handled[0].outputs))
            or (is_full and self._is_over(MAX_UNSTORED // 2, MAX_UNSTORED_BYTES // 2))
        ):
            settled += await self._settle_first()
        return settled

    async def settle_all(self) -> list[WaitingReport]:
        """Wait for all reports; those that are done with."""
        settled: list[WaitingReport] = []
        while self._handled:
            settled += await self._settle_first()
        return settled

    def _is_over(self, num_reports: int, num_bytes: int) -> bool:
        return len(self._handled) > num_reports or self._num_bytes > num_bytes

    async def _settle_first(self) -> list[WaitingReport]:
        report, outputs = self._handled.popleft()
        self._num_bytes -= len(report.message.payload)
        if all([await self._is_stored(*output) for output in outputs]):
            return [report]
        self.gave_up = True
        return []

    async def _is_stored(self, output: Message, acknowledged: asyncio.Future[int]) -> bool:
        """When FEED is full, drop metric windows and traces, of which there are newer ones soon; retry states."""
        try:
            await acknowledged
        except StreamFullError:
            if isinstance(output, State):
                return await self._context.publish_when_room(output)
            self._context.count("windows_shed" if isinstance(output, MetricWindow) else "traces_shed")
        return True
