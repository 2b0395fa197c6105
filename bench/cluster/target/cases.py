"""Cases: what is slow about the hosts. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from bench.hosts import HostsError, Link


class TargetCase(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts of one rank each, numbered as the ranks."""

    name: str
    title: str
    num_hosts: int = 4
    cores: float = 0.4
    """Seconds of processor per second that each host has; what is left of two processors is for the services."""
    slow_cpus: dict[int, float] = {}
    """The same for single ranks."""
    slow_links: dict[int, str] = {}
    """Rates of single ranks' links, in both directions, as `tc` writes them."""
    later_after_s: float = 0.0
    """Training time after which `later_cpus` holds."""
    later_cpus: dict[int, float] = {}
    time_limit_s: float = 80.0
    """Training time after which a run has missed the target."""

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be run."""
        if self.num_hosts < 2:
            raise ValueError(f"{self.name}: {self.num_hosts} hosts: a network has at least 2")
        for rank in {*self.slow_cpus, *self.slow_links, *self.later_cpus}:
            if not 0 <= rank < self.num_hosts:
                raise ValueError(f"{self.name}: rank {rank} does not exist, hosts are 0 to {self.num_hosts - 1}")
        for rank in self.slow_links:
            try:
                self.link_of(rank)
            except HostsError as error:
                raise ValueError(f"{self.name}: {error}") from error

    def link_of(self, rank: int) -> Link | None:
        """The link of a rank's host; `None`: as fast as memory."""
        rate = self.slow_links.get(rank)
        return None if rate is None else Link.parse(rate)

    def cores_of(self, rank: int, trained_s: float) -> float:
        """The share of the processor that a rank's host has at a training time."""
        later = self.later_cpus if trained_s >= self.later_after_s else {}
        return later.get(rank, self.slow_cpus.get(rank, self.cores))


_ALL = (
    TargetCase(name="unequal-processors", title="rank 3 on a third of a processor's share", slow_cpus={3: 0.13}),
    TargetCase(name="slow-link", title="rank 2's link at 30 Mbit/s", slow_links={2: "30mbit"}),
    TargetCase(name="slow-links", title="all links at 40 Mbit/s", slow_links=dict.fromkeys(range(4), "40mbit")),
    TargetCase(
        name="slow-down",
        title="rank 1 falls to a third after 5 s of training",
        later_after_s=5.0,
        later_cpus={1: 0.13},
    ),
    TargetCase(name="equal", title="all equal (harm check)"),
)
CASES: Mapping[str, TargetCase] = MappingProxyType({case.name: case for case in _ALL})
