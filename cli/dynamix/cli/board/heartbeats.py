"""Who is alive: the newest heartbeat of every service, and how long ago it was. Pure: the time is told, not read."""

import msgspec

from dynamix.schemas.messages import Live

LATE_AFTER_S = 3.0
"""Three heartbeats missed."""
FORGOTTEN_AFTER_S = 60.0
STEERING = ("collector", "reward", "arbitrator")
"""Without a heartbeat of each of these nothing is steered."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The newest heartbeat of one process."""

    live: Live
    heard_s: float
    """When it was heard, on the clock of whoever asks."""

    def is_late(self, now_s: float) -> bool:
        """Whether it should have been heard again by now."""
        return now_s - self.heard_s > LATE_AFTER_S


class Services:
    """The newest heartbeat of every process, by service and instance."""

    def __init__(self) -> None:
        self._beats: dict[tuple[str, str], Beat] = {}

    def add(self, live: Live, now_s: float) -> None:
        """Take a heartbeat."""
        self._beats[live.service, live.instance] = Beat(live=live, heard_s=now_s)

    def beats(self, now_s: float) -> list[Beat]:
        """All that are not forgotten, sorted; of services that do not steer, such as a trainer, none that is late."""
        return [
            beat
            for (service, _), beat in sorted(self._beats.items())
            if now_s - beat.heard_s <= FORGOTTEN_AFTER_S and (service in STEERING or not beat.is_late(now_s))
        ]

    def missing(self, now_s: float) -> list[str]:
        """Services that steer and of which nobody is heard."""
        heard = {beat.live.service for beat in self.beats(now_s) if not beat.is_late(now_s)}
        return [service for service in STEERING if service not in heard]

    def count(self, name: str, now_s: float) -> int:
        """Sum of one counter over all processes."""
        return sum(beat.live.counters.get(name, 0) for beat in self.beats(now_s))
