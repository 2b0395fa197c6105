"""This process's own connections to other ranks: their TCP_INFO, without privileges, and their names in the kernel.

Cost: 6 us per connection and window. What is read are counters since the connection began; we report them since
attach, and keep what a closed connection had counted. The names, socket cookies, are what a kernel probe finds the same
connections by: both speak of the very same sockets.
"""

import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dynamix.schemas.messages import SocketCounters
from dynamix.schemas.messages.fields import MAX_SOCKETS

from .connections import Connection, Endpoint, TcpInfo, own_connections, tcp_info

MAX_NODE_SOCKETS = 40_960
"""Sockets that the ranks of one node name together: at most 360 KB of a report, which may have 512."""

LEAST_SENT_BYTES = 256 * 1024
"""In a window over a connection, for a rate: less is messages, whose time is that of a round trip."""
LEAST_SENDING_US = 10_000
"""Kernels count in ticks of up to 10 ms: who sent for less was as fast as makes no difference."""

SEVERAL = -1
"""In place of a rank: one of those that share an address."""

_log = logging.getLogger("dynamix.trainer")


class _Counted(NamedTuple):
    """A connection that is counted."""

    fd: int
    peer: int | None
    """The rank at the other end, if it is on another node: else nothing is sent over a link."""
    first: TcpInfo
    newest: TcpInfo
    rated: TcpInfo
    """When the last rate was taken."""

    @property
    def difference(self) -> TcpInfo:
        """Counters since `first`, and the newest round trip time."""
        since = TcpInfo(*map(operator.sub, self.newest, self.first))
        return since._replace(srtt_us=self.newest.srtt_us)

    @property
    def link(self) -> "LinkRate | None":
        """What it showed of its link since the last rate was taken; `None` where it sent too little."""
        sent, sending_us = (
            getattr(self.newest, name) - getattr(self.rated, name) for name in ("acked_bytes", "sending_us")
        )
        if sent < LEAST_SENT_BYTES or self.newest.sending_us < 0 or self.peer is None:
            return None
        return LinkRate(1e6 * sent / max(sending_us, LEAST_SENDING_US), self.peer)


class LinkRate(NamedTuple):
    """How fast this rank sent to another one while it did: what both of their links carry at least."""

    bytes_per_s: float
    peer: int
    """The other rank."""


class PeerSockets:
    """Cumulative counters over the connections to other ranks, and the cookies of the whole node's.

    Which connections those are is known once all ranks listed theirs: `match` takes the lists. Call it again when
    connections may have been added; counters never go back, and a cookie stays when its connection closes.
    """

    def __init__(self, excluded_ports: Iterable[int] = ()) -> None:
        self._excluded = frozenset(excluded_ports)
        self._counted: dict[Connection, _Counted] = {}
        self._closed = TcpInfo(0, 0, 0, 0)
        self._cookies: dict[int, tuple[int, ...]] = {}

    def candidates(self) -> tuple[Connection, ...]:
        """Every connection that may lead to a rank: neither the store's nor the bus's."""
        return tuple(
            connection
            for connection in own_connections()
            if connection.local.port not in self._excluded and connection.remote.port not in self._excluded
        )

    def match(self, listings: Sequence[Collection[Connection]], rank: int, node_ranks: Iterable[int]) -> None:
        """Count and name the connections that two ranks listed from both ends; linear in their number.

        `listings` holds the candidates of all ranks, in rank order. `rank` is this one, whose connections are counted
        from now on; those of `node_ranks`, it among them, are named.
        """
        mutual = mutual_connections(listings, node_ranks)
        self._count(mutual[rank], near={*mutual, SEVERAL})
        for named, connections in mutual.items():
            found = {connection.cookie for connection in connections if connection.cookie is not None}
            self._cookies[named] = tuple(sorted(found.union(self._cookies.get(named, ()))))
        if not self._can_name and rank == min(mutual):
            _log.warning(
                "the ranks of this node have %d sockets to others, more than a report can name (%d, and %d per rank): "
                "their network metrics come from TCP_INFO, not from a kernel probe",
                sum(map(len, self._cookies.values())),
                MAX_NODE_SOCKETS,
                MAX_SOCKETS,
            )

    @property
    def cookies(self) -> Mapping[int, tuple[int, ...]]:
        """The cookies of each of the node's ranks, ascending.

        Empty when there are too many to name: a part of the sockets would be a part of the traffic and look like all
        of it, while TCP_INFO, to which nameless ranks are left, counts them all.
        """
        return self._cookies if self._can_name else {}

    def read(self) -> SocketCounters | None:
        """The counters since `match` first saw each connection; `None` when there never was one."""
        self._refresh()
        if not self._counted and self._closed == TcpInfo(0, 0, 0, 0):
            return None
        parts = [counted.difference for counted in self._counted.values()]
        return SocketCounters(
            tx_bytes=self._closed.acked_bytes + sum(part.acked_bytes for part in parts),
            rx_bytes=self._closed.received_bytes + sum(part.received_bytes for part in parts),
            retransmits=self._closed.retransmits + sum(part.retransmits for part in parts),
            srtt_us=sum(part.srtt_us for part in parts) / len(parts) if parts else None,
        )

    def take_link(self) -> LinkRate | None:
        """The fastest connection since the last call, up to the newest `read`; `None` where none sent much."""
        found = [link for counted in self._counted.values() if (link := counted.link) is not None]
        self._counted = {each: counted._replace(rated=counted.newest) for each, counted in self._counted.items()}
        return max(found, default=None)

    @property
    def _can_name(self) -> bool:
        counts = [len(cookies) for cookies in self._cookies.values()]
        return max(counts, default=0) <= MAX_SOCKETS and sum(counts) <= MAX_NODE_SOCKETS

    def _count(self, connections: Mapping[Connection, int], near: Collection[int]) -> None:
        descriptors = own_connections()
        for connection, peer in connections.items():
            fd = descriptors.get(connection)
            if fd is None or connection in self._counted:  # closed since it was listed, or known
                continue
            info = tcp_info(fd, connection)
            if info is not None:
                self._counted[connection] = _Counted(fd, None if peer in near else peer, info, info, info)

    def _refresh(self) -> None:
        for connection, counted in list(self._counted.items()):
            info = tcp_info(counted.fd, connection)
            if info is not None:
                self._counted[connection] = counted._replace(newest=info)
                continue
            part = self._counted.pop(connection).difference
            self._closed = TcpInfo(*map(operator.add, self._closed, part))._replace(srtt_us=0)


def mutual_connections(
    listings: Sequence[Collection[Connection]], ranks: Iterable[int]
) -> dict[int, dict[Connection, int]]:
    """The connections of each of `ranks` that another rank listed from the other end, with that rank.

    A connection between two sockets of one process is none; two ranks with the same addresses, in network namespaces
    of their own, do not hide each other, but which of them it is is not known: `SEVERAL`.
    """
    owners: dict[tuple[Endpoint, Endpoint], int] = {}
    for rank, listed in enumerate(listings):
        for connection in listed:
            ends = (connection.remote, connection.local)
            if owners.setdefault(ends, rank) != rank:
                owners[ends] = SEVERAL
    return {
        rank: {
            found: peer for found in listings[rank] if (peer := owners.get((found.local, found.remote), rank)) != rank
        }
        for rank in ranks
    }
