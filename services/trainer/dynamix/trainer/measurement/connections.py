"""The TCP connections of this process as the kernel knows them: both ends, cookie, TCP_INFO (Linux; no privileges).

By libc on bare descriptors: a Python socket object could change their blocking mode, or close them.
"""

import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


def own_connections() -> dict[Connection, int]:
    """Every connected TCP socket of this process, with a descriptor of it."""
    found = {}
    for entry in FDS.iterdir():
        try:
            is_socket = os.readlink(entry).startswith("socket:")  # noqa: PTH115 - one call; the target is no path
        except OSError:  # closed since it was listed
            continue
        if is_socket and (connection := _connection(int(entry.name))) is not None:
            found[connection] = int(entry.name)
    return found


def tcp_info(fd: int, connection: Connection) -> TcpInfo | None:
    """Counters of a connection; `None` when it is closed, or its descriptor is another's by now."""
    is_known = _connection(fd) == connection if connection.cookie is None else _cookie(fd) == connection.cookie
    return _tcp_info(fd) if is_known else None


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _connection(fd: int) -> Connection | None:
    """The connection behind a descriptor; `None` for anything but an established TCP connection."""
    if _tcp_info(fd) is None:
        return None
    local, remote = _endpoint(_libc().getsockname, fd), _endpoint(_libc().getpeername, fd)
    return None if local is None or remote is None else Connection(local, remote, _cookie(fd))


def _tcp_info(fd: int) -> TcpInfo | None:
    info = ctypes.create_string_buffer(256)
    length = ctypes.c_uint32(len(info))
    failed = _libc().getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(length))
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
    failed = _libc().getsockopt(fd, socket.SOL_SOCKET, SO_COOKIE, ctypes.byref(cookie), ctypes.byref(length))
    return None if failed or cookie.value == 0 else cookie.value


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
