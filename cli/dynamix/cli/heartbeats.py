"""Which services are alive: the newest heartbeat of each, and how long ago it was. Pure: the caller passes the time."""

from collections.abc import Iterable
from typing import Any

import msgspec

from dynamix.schemas.messages import Live

from .services import SERVICES

LATE_AFTER_S = 3.0
"""Three heartbeats missed."""
KEPT_S = 60.0
UNANSWERED = ("bus_unacknowledged", "bus_unanswered")
"""Counters of a process whose broker does not store now."""
NOT_STORED = (*UNANSWERED, "bus_failed_lately")
"""And of one whose broker did not, within the last minute."""


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

    def nodes_without_collector(self, nodes: Iterable[str], now_s: float) -> list[str]:
        """Those of `nodes` on which no collector is heard, while one is heard elsewhere."""
        collectors = (beat.live for beat in self.recent(now_s) if beat.live.service == "collector")
        heard = {live.node for live in collectors if live.node}
        return [node for node in nodes if node not in heard] if heard else []

    def num_unanswered(self, now_s: float) -> int:
        """Messages that the broker has not acknowledged or answered for seconds, of all processes."""
        return sum(self.count(name, now_s) for name in UNANSWERED)

    def num_not_stored(self, now_s: float) -> int:
        """Messages not acknowledged or answered for seconds, or not stored lately, of all processes."""
        return sum(self.count(name, now_s) for name in NOT_STORED)

    def count(self, name: str, now_s: float) -> int:
        """Sum of one counter over all processes."""
        return sum(beat.live.counters.get(name, 0) for beat in self.recent(now_s))
