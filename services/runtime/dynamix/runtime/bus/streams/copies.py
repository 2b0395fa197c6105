"""Where a cluster keeps the copies of a stream, and which of them lag, as the stream's leader says."""

import msgspec


class StreamCopy(msgspec.Struct, frozen=True):
    """What a stream's leader says of another copy."""

    name: str
    """The name of its server."""
    current: bool = False
    offline: bool = False
    active: int = 0
    """Nanoseconds since it was heard."""
    lag: int = 0
    """Entries of the log that it does not have."""

    @property
    def is_behind(self) -> bool:
        """Whether it is no use at the moment, should another server be lost. One under load may be for a moment."""
        return self.offline or not self.current

    def __str__(self) -> str:
        state = "offline" if self.offline else "current" if self.current else "not current"
        return f"{self.name} is {state}, lags by {self.lag}, was heard {self.active / 1e9:.1f} s ago"


class StreamCopies(msgspec.Struct, frozen=True):
    """Who holds a stream: the leader, and what that says of the others."""

    leader: str = ""
    replicas: tuple[StreamCopy, ...] = ()

    @property
    def behind(self) -> list[StreamCopy]:
        """The copies that are not current."""
        return [one for one in self.replicas if one.is_behind]

    def are_whole(self, num_replicas: int) -> bool:
        """Whether there are so many, the leader's included, and none lags."""
        return bool(self.leader) and len(self.replicas) == num_replicas - 1 and not self.behind

    def __str__(self) -> str:
        head = f"leader {self.leader or 'unknown'}, {len(self.replicas)} other copies"
        return "; ".join([head, *map(str, self.behind)])
