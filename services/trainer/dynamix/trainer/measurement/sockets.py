"""This process and its connections to other ranks as the kernel knows them: /proc, TCP_INFO, cookies (Linux only).

No privileges are needed. A connection costs 6 us per window. Counters are reported since attach and include closed
connections. A kernel probe finds the same connections by their socket cookies.
"""

import ctypes
import ipaddress
import operator
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # public, missing in the stubs of dist
from torch.distributed import distributed_c10d

from dynamix.schemas.messages import NetworkMetrics
from dynamix.schemas.messages.allocation import MAX_SOCKETS

PROC = Path("/proc")


class ProcessIdentity(NamedTuple):
    """Identity of a process, with which a collector finds and verifies it."""

    pid: int
    pid_start_ticks: int
    """Start time in clock ticks since boot."""
    pid_namespace: int
    """Inode of the pid namespace in which `pid` counts."""
    uid: int


def this_process() -> ProcessIdentity:
    """Identity of the calling process."""
    pid = os.getpid()
    return ProcessIdentity(pid, start_ticks(pid), (PROC / "self/ns/pid").stat().st_ino, os.getuid())


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: field 22 of /proc/<pid>/stat (proc(5))."""
    stat = (PROC / str(pid) / "stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[19])  # the command name may hold spaces and brackets


def fingerprint(pid: int) -> str:
    """Names a process of this machine apart from every other in time and place."""
    seen = (PROC / str(pid)).exists()  # a parent is not when it is outside of our pid namespace
    return f"{boot_id()}/{pid}/{start_ticks(pid) if seen else 0}"


def boot_id() -> str:
    """Names this machine since it was started; random (random(4))."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


FDS = Path("/proc/self/fd")
TCP_ESTABLISHED = 1
INFO_BYTES = 136
"""struct tcp_info up to tcpi_bytes_received (linux/tcp.h, since 4.1)."""
BUSY_BYTES = 184
"""The same up to tcpi_rwnd_limited (since 4.10)."""
SO_COOKIE = 57
"""Socket option of asm-generic/socket.h, since Linux 4.12; Python's `socket` has no name for it."""


class Endpoint(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


class Connection(NamedTuple):
    """An established TCP connection, as its process reports it to the other ranks."""

    local: Endpoint
    remote: Endpoint
    cookie: int | None
    """Its socket's number in the kernel, never given twice (SO_COOKIE); `None` where the kernel has no cookies."""


class TcpInfo(NamedTuple):
    """Counters of one connection since it began."""

    acked_bytes: int
    received_bytes: int
    retransmits: int
    srtt_us: int
    sending_us: int = -1
    """While something was sent or on its way, less the time that the receiver left no room; below 0: not known.

    The kernel counts it in ticks of 1 to 10 ms; over many transfers what is cut off and what is added are equal.
    """

    def since(self, before: "TcpInfo") -> "TcpInfo":
        """The difference to an earlier value, with the newest round trip time."""
        return TcpInfo(*map(operator.sub, self, before))._replace(srtt_us=self.srtt_us)


def own_connections() -> dict[Connection, int]:
    """Every connected TCP socket of this process, with a descriptor of it."""
    found = {}
    for entry in FDS.iterdir():
        try:
            is_socket = os.readlink(entry).startswith("socket:")  # noqa: PTH115 - one call; the target is not a path
        except OSError:  # closed since it was listed
            continue
        if is_socket and (connection := _connection(int(entry.name))) is not None:
            found[connection] = int(entry.name)
    return found


def tcp_info(fd: int, connection: Connection) -> TcpInfo | None:
    """Counters of a connection; `None` when it is closed, or its descriptor is another's by now."""
    is_known = _connection(fd) == connection if connection.cookie is None else _cookie(fd) == connection.cookie
    return _tcp_info(fd) if is_known else None


_LIBC = ctypes.CDLL(None)  # a `socket` of Python on a descriptor sets its owner's blocking mode (setdefaulttimeout)


def _connection(fd: int) -> Connection | None:
    """The connection behind a descriptor; `None` for anything but an established TCP connection."""
    if _tcp_info(fd) is None:
        return None
    local, remote = _endpoint(_LIBC.getsockname, fd), _endpoint(_LIBC.getpeername, fd)
    return None if local is None or remote is None else Connection(local, remote, _cookie(fd))


def _tcp_info(fd: int) -> TcpInfo | None:
    info = ctypes.create_string_buffer(256)
    length = ctypes.c_uint32(len(info))
    failed = _LIBC.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length))
    if failed or length.value < INFO_BYTES or info.raw[0] != TCP_ESTABLISHED:
        return None
    (srtt_us,) = struct.unpack_from("=I", info, 68)
    (retransmits,) = struct.unpack_from("=I", info, 100)
    acked_bytes, received_bytes = struct.unpack_from("=QQ", info, 120)
    busy_us, full_us = struct.unpack_from("=QQ", info, 168) if length.value >= BUSY_BYTES else (0, 1)
    return TcpInfo(acked_bytes, received_bytes, retransmits, srtt_us, busy_us - full_us)


def _cookie(fd: int) -> int | None:
    """The number of a socket in the kernel; `None` for what is not a socket, or where the kernel has no cookies."""
    cookie, length = ctypes.c_uint64(), ctypes.c_uint32(8)
    failed = _LIBC.getsockopt(fd, socket.SOL_SOCKET, SO_COOKIE, ctypes.byref(cookie), ctypes.byref(length))
    return None if failed or cookie.value == 0 else cookie.value


def _endpoint(call: Callable[..., int], fd: int) -> Endpoint | None:
    """One end of a socket; an IPv4 address inside IPv6 is written as IPv4, as the other end sees it."""
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


def default_store() -> Any:
    """The store of torch.distributed, of which torch has no public name; `None` without a process group."""
    store: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None  # noqa: SLF001
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


MAX_NODE_SOCKETS = 40_960
"""Sockets that the ranks of one node name together: at most 360 KB of a report, which may have 512."""

LEAST_SENT_BYTES = 256 * 1024
"""Least bytes over a connection in a window for a rate: smaller amounts measure the round trip."""
LEAST_SENDING_US = 10_000
"""Kernels count in ticks of up to 10 ms: who sent for less was as fast as makes no difference."""

SEVERAL = -1
"""Placeholder of a rank: one of several that share an address."""


class _Counted(NamedTuple):
    """A connection that is counted."""

    fd: int
    peer: int | None
    """The rank at the other end, if it is on another node: else nothing is sent over a link."""
    first: TcpInfo
    newest: TcpInfo
    rated: TcpInfo
    """Time of the last rate."""


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

    def match(self, listings: Sequence[Collection[Connection]], rank: int, node_ranks: Collection[int]) -> None:
        """Count and name the connections that two ranks listed from both ends; linear in their number.

        `listings` holds the candidates of all ranks, in rank order. `rank` is this one, whose connections are counted
        from now on; those of `node_ranks`, it among them, are named.
        """
        owners: dict[tuple[Endpoint, Endpoint], int] = {}
        for owner, listed in enumerate(listings):
            for each in listed:
                ends = (each.remote, each.local)
                if owners.setdefault(ends, owner) != owner:  # both have this address, in namespaces of their own
                    owners[ends] = SEVERAL
        near = {*node_ranks, SEVERAL}
        for named in node_ranks:
            peers = {each: owners.get((each.local, each.remote), named) for each in listings[named]}
            mutual = {each: peer for each, peer in peers.items() if peer != named}  # not within one process
            found = {each.cookie for each in mutual if each.cookie is not None}
            self._cookies[named] = tuple(sorted(found.union(self._cookies.get(named, ()))))
            if named == rank:
                self._count(mutual, near)

    @property
    def cookies(self) -> Mapping[int, tuple[int, ...]]:
        """The cookies of each of the node's ranks, ascending.

        Empty when there are too many to name: a part of the sockets would be a part of the traffic and look like all
        of it, while TCP_INFO, to which nameless ranks are left, counts them all.
        """
        counts = [len(cookies) for cookies in self._cookies.values()]
        return self._cookies if max(counts, default=0) <= MAX_SOCKETS and sum(counts) <= MAX_NODE_SOCKETS else {}

    def read(self) -> NetworkMetrics | None:
        """The counters since `match` first saw each connection; `None` when there never was one."""
        for connection, counted in list(self._counted.items()):
            info = tcp_info(counted.fd, connection)
            if info is None:
                del self._counted[connection]
                part = counted.newest.since(counted.first)
                self._closed = TcpInfo(*map(operator.add, self._closed, part))._replace(srtt_us=0)
            else:
                self._counted[connection] = counted._replace(newest=info)
        if not self._counted and self._closed == TcpInfo(0, 0, 0, 0):
            return None
        parts = [counted.newest.since(counted.first) for counted in self._counted.values()]
        return NetworkMetrics(
            tx_bytes=self._closed.acked_bytes + sum(part.acked_bytes for part in parts),
            rx_bytes=self._closed.received_bytes + sum(part.received_bytes for part in parts),
            retransmits=self._closed.retransmits + sum(part.retransmits for part in parts),
            srtt_us=sum(part.srtt_us for part in parts) / len(parts) if parts else None,
        )

    def take_link(self) -> tuple[float, int] | tuple[None, None]:
        """Bytes per second over the fastest connection while it sent, and the rank at its other end.

        From the last call to the newest `read`, a lower bound for both links; `None` where none sent much.
        """
        found: list[tuple[float, int]] = []
        for connection, counted in self._counted.items():
            since = counted.newest.since(counted.rated)
            self._counted[connection] = counted._replace(rated=counted.newest)
            if since.acked_bytes >= LEAST_SENT_BYTES and counted.newest.sending_us >= 0 and counted.peer is not None:
                rate = 1e6 * since.acked_bytes / max(since.sending_us, LEAST_SENDING_US)
                found.append((rate, counted.peer))
        return max(found, default=(None, None))

    def _count(self, connections: Mapping[Connection, int], near: Collection[int]) -> None:
        descriptors = own_connections()
        for connection, peer in connections.items():
            fd = descriptors.get(connection)
            if fd is None or connection in self._counted:  # closed since it was listed, or known
                continue
            info = tcp_info(fd, connection)
            if info is not None:
                self._counted[connection] = _Counted(fd, None if peer in near else peer, info, info, info)
