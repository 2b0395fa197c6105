"""TCP_INFO of this process's own connections to other ranks: the network as the kernel counted it, without privileges.

Cost: 10 us per connection and window (findings B5: 45-126 us for 4-8 sockets). What is read are counters since
the connection began; we report them since attach, and keep what a closed connection had counted.
"""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dynamix.schemas.messages import SocketCounters

FDS = Path("/proc/self/fd")
TCP_ESTABLISHED = 1
INFO_BYTES = 136
"""struct tcp_info up to tcpi_bytes_received (linux/tcp.h, since 4.1)."""


class Endpoint(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


class Connection(NamedTuple):
    """An established TCP connection of this process, with its descriptor."""

    fd: int
    local: Endpoint
    remote: Endpoint


class TcpInfo(NamedTuple):
    """Counters of one connection since it began."""

    acked_bytes: int
    received_bytes: int
    retransmits: int
    srtt_us: int


class PeerSockets:
    """Cumulative counters over the connections to other ranks.

    Which connections those are is known once all ranks told their ends: `match` takes them. Call it again when
    connections may have been added; counters never go back.
    """

    def __init__(self, excluded_ports: Iterable[int] = ()) -> None:
        self._excluded = frozenset(excluded_ports)
        self._first: dict[Connection, TcpInfo] = {}
        self._newest: dict[Connection, TcpInfo] = {}
        self._closed = TcpInfo(0, 0, 0, 0)

    def candidates(self) -> tuple[tuple[Endpoint, Endpoint], ...]:
        """Both ends of every connection that may lead to a rank: neither the store's nor the bus's."""
        return tuple((found.local, found.remote) for found in self._candidates())

    def match(self, others: Iterable[tuple[Endpoint, Endpoint]]) -> None:
        """Count every connection whose two ends some other rank named the other way round."""
        reversed_ends = {(remote, local) for local, remote in others}
        for connection in self._candidates():
            if connection in self._first or (connection.local, connection.remote) not in reversed_ends:
                continue
            info = tcp_info(connection)
            if info is not None:
                self._first[connection] = self._newest[connection] = info

    def read(self) -> SocketCounters | None:
        """The counters since `match` first saw each connection; `None` when there never was one."""
        self._refresh()
        if not self._first and self._closed == TcpInfo(0, 0, 0, 0):
            return None
        parts = [_difference(self._newest[open_], self._first[open_]) for open_ in self._first]
        return SocketCounters(
            tx_bytes=self._closed.acked_bytes + sum(part.acked_bytes for part in parts),
            rx_bytes=self._closed.received_bytes + sum(part.received_bytes for part in parts),
            retransmits=self._closed.retransmits + sum(part.retransmits for part in parts),
            srtt_us=sum(part.srtt_us for part in parts) / len(parts) if parts else None,
        )

    def _refresh(self) -> None:
        for connection in list(self._first):
            info = tcp_info(connection)
            if info is not None:
                self._newest[connection] = info
                continue
            part = _difference(self._newest.pop(connection), self._first.pop(connection))
            self._closed = TcpInfo(
                self._closed.acked_bytes + part.acked_bytes,
                self._closed.received_bytes + part.received_bytes,
                self._closed.retransmits + part.retransmits,
                0,
            )

    def _candidates(self) -> list[Connection]:
        return [
            connection
            for connection in own_connections()
            if connection.local.port not in self._excluded and connection.remote.port not in self._excluded
        ]


def own_connections() -> list[Connection]:
    """Every connected TCP socket of this process."""
    found = []
    for entry in FDS.iterdir():
        try:
            is_socket = os.readlink(entry).startswith("socket:")  # noqa: PTH115 - one call; the target is no path
        except OSError:  # closed since it was listed
            continue
        if is_socket and (connection := _connection(int(entry.name))) is not None:
            found.append(connection)
    return sorted(found)


def tcp_info(connection: Connection) -> TcpInfo | None:
    """Counters of a connection; `None` when it is closed, or its descriptor is another's by now."""
    if _connection(connection.fd) != connection:
        return None
    return _tcp_info(connection.fd)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _connection(fd: int) -> Connection | None:
    """The connection behind a descriptor; `None` for anything but an established TCP connection."""
    if _tcp_info(fd) is None:
        return None
    local, remote = _endpoint(_libc().getsockname, fd), _endpoint(_libc().getpeername, fd)
    return None if local is None or remote is None else Connection(fd, local, remote)


def _tcp_info(fd: int) -> TcpInfo | None:
    """TCP_INFO by libc on the bare descriptor: a Python socket object could change its blocking mode, or close it."""
    info = ctypes.create_string_buffer(256)
    length = ctypes.c_uint32(len(info))
    failed = _libc().getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length))
    if failed or length.value < INFO_BYTES or info.raw[0] != TCP_ESTABLISHED:
        return None
    (srtt_us,) = struct.unpack_from("=I", info, 68)
    (retransmits,) = struct.unpack_from("=I", info, 100)
    acked_bytes, received_bytes = struct.unpack_from("=QQ", info, 120)
    return TcpInfo(acked_bytes, received_bytes, retransmits, srtt_us)


def _endpoint(call: Callable[..., int], fd: int) -> Endpoint | None:
    """One end of a socket; an IPv4 address inside IPv6 is written as IPv4, since the other end sees it so."""
    raw = ctypes.create_string_buffer(128)
    length = ctypes.c_uint32(len(raw))
    if call(fd, raw, ctypes.byref(length)):
        return None
    (family,) = struct.unpack_from("=H", raw)
    (port,) = struct.unpack_from("!H", raw, 2)
    if family == socket.AF_INET:
        return Endpoint(str(ipaddress.IPv4Address(raw.raw[4:8])), port)
    if family == socket.AF_INET6:
        address = ipaddress.IPv6Address(raw.raw[8:24])
        return Endpoint(str(address.ipv4_mapped or address), port)
    return None


def _difference(newest: TcpInfo, first: TcpInfo) -> TcpInfo:
    return TcpInfo(
        newest.acked_bytes - first.acked_bytes,
        newest.received_bytes - first.received_bytes,
        newest.retransmits - first.retransmits,
        newest.srtt_us,
    )
