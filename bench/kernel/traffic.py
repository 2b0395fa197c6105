"""Loopback traffic of several kinds: what the sending and the receiving process do."""

import contextlib
import resource
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple

Way = Literal["stream", "echo", "datagram", "connection"]

SO_COOKIE = 57
QUIET_S = 0.3
"""Datagrams may be lost, the last one too: silence for so long ends them."""
_LAST, _ANOTHER = b"\0", b"\1"
CONNECT_TIMEOUT_S = 20.0


class TrafficKind(NamedTuple):
    """One kind of traffic."""

    name: str
    way: Way
    num_streams: int
    chunk_bytes: int
    item: str
    """What is counted."""
    item_bytes: float
    """So many bytes are an item; 0: messages and connections are items themselves."""
    max_segment_bytes: int | None = None


class SideTiming(NamedTuple):
    """What one process did in a block."""

    num_bytes: int
    num_messages: int
    wall_s: float
    cpu_s: float
    """CPU time of the process; what the kernel does for it on loopback is charged to it, nearly all."""


Work = Callable[[socket.socket], tuple[int, int]]
"""On one socket: bytes and messages."""


class Receiver:
    """The side that listens."""

    def __init__(self) -> None:
        self._kind: TrafficKind | None = None
        self._sockets: list[socket.socket] = []

    def listen(self, kind: TrafficKind) -> int:
        """Open the port to which the sender shall connect."""
        self._kind = kind
        datagrams = kind.way == "datagram"
        listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if datagrams else socket.SOCK_STREAM)
        self._sockets = [listening]
        _limit_segments(listening, kind)
        listening.bind(("0.0.0.0" if kind.way == "connection" else "127.0.0.1", 0))
        if not datagrams:
            listening.listen(1024)
        return int(listening.getsockname()[1])

    def accept(self) -> list[int]:
        """Take the sender's connections; their cookies."""
        assert self._kind is not None, "listen first"
        if self._kind.way in ("stream", "echo"):
            listening = self._sockets.pop()
            with listening:
                self._sockets = [listening.accept()[0] for _ in range(self._kind.num_streams)]
        return [cookie(end) for end in self._sockets]

    def run(self, duration_s: float) -> SideTiming:
        """Receive until the sender ends; it knows for how long."""
        del duration_s
        assert self._kind is not None, "listen first"
        works: dict[Way, Work] = {"stream": _drain, "echo": _echo, "datagram": _drain_datagrams, "connection": _serve}
        ends = self._sockets
        if self._kind.way == "connection":
            ends = ends * self._kind.num_streams
        return _timed([partial(works[self._kind.way], end) for end in ends])

    def close(self) -> None:
        """Close whatever is open."""
        _close(self._sockets)


class Sender:
    """The side that connects."""

    def __init__(self) -> None:
        self._kind: TrafficKind | None = None
        self._port = 0
        self._sockets: list[socket.socket] = []

    def connect(self, kind: TrafficKind, port: int) -> list[int]:
        """Open the sockets; their cookies. Those that only exist to be opened and closed come later."""
        self._kind, self._port = kind, port
        if kind.way != "connection":
            self._sockets = [_connected(kind, port) for _ in range(kind.num_streams)]
        return [cookie(end) for end in self._sockets]

    def run(self, duration_s: float) -> SideTiming:
        """Send for so long."""
        assert self._kind is not None, "connect first"
        kind, until_s = self._kind, time.monotonic() + duration_s
        if kind.way == "connection":
            starts = range(kind.num_streams)
            return _timed([partial(_open_and_close, self._port, start, until_s) for start in starts])
        chunk = bytes(kind.chunk_bytes)
        work = _exchange if kind.way == "echo" else _send
        return _timed([partial(work, end, chunk, until_s) for end in self._sockets])

    def close(self) -> None:
        """Close whatever is open."""
        _close(self._sockets)


def cookie(end: socket.socket) -> int:
    """The kernel's name for a socket."""
    (number,) = struct.unpack("=Q", end.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))
    return int(number)


def _connected(kind: TrafficKind, port: int) -> socket.socket:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind.way == "datagram" else socket.SOCK_STREAM)
    _limit_segments(end, kind)
    end.connect(("127.0.0.1", port))
    if kind.way == "echo":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def _limit_segments(end: socket.socket, kind: TrafficKind) -> None:
    if kind.max_segment_bytes is not None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, kind.max_segment_bytes)


def _timed(calls: Sequence[Callable[[], tuple[int, int]]]) -> SideTiming:
    """A thread for each; sending and receiving let go of the interpreter."""
    cpu_s, start_s = _cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(len(calls)) as pool:
        done = [future.result() for future in [pool.submit(call) for call in calls]]
    wall_s = time.perf_counter() - start_s
    num_bytes, num_messages = (sum(column) for column in zip(*done, strict=True))
    return SideTiming(num_bytes, num_messages, wall_s, _cpu_s() - cpu_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _close(sockets: list[socket.socket]) -> None:
    while sockets:
        sockets.pop().close()


def _send(end: socket.socket, chunk: bytes, until_s: float) -> tuple[int, int]:
    num = 0
    while time.monotonic() < until_s:
        end.sendall(chunk)
        num += 1
    if end.type == socket.SOCK_STREAM:
        end.shutdown(socket.SHUT_WR)
    return num * len(chunk), num


def _drain(end: socket.socket) -> tuple[int, int]:
    buffer = bytearray(1 << 17)
    num_bytes = num = 0
    while received := end.recv_into(buffer):
        num_bytes += received
        num += 1
    return num_bytes, num


def _drain_datagrams(end: socket.socket) -> tuple[int, int]:
    end.settimeout(QUIET_S)
    buffer = bytearray(1 << 16)
    num_bytes = num = 0
    with contextlib.suppress(TimeoutError):
        while True:
            num_bytes += end.recv_into(buffer)
            num += 1
    return num_bytes, num


def _exchange(end: socket.socket, chunk: bytes, until_s: float) -> tuple[int, int]:
    num = 0
    while time.monotonic() < until_s:
        end.sendall(chunk)
        end.recv(len(chunk), socket.MSG_WAITALL)
        num += 1
    end.shutdown(socket.SHUT_WR)
    return num * len(chunk), num


def _echo(end: socket.socket) -> tuple[int, int]:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    num_bytes = num = 0
    while received := end.recv(1 << 12):
        end.sendall(received)
        num_bytes += len(received)
        num += 1
    return num_bytes, num


def _open_and_close(port: int, number: int, until_s: float) -> tuple[int, int]:
    """One connection after the other, to ever other addresses: a closed one keeps its pair of ports for a minute."""
    num = 0
    while time.monotonic() < until_s:
        _call_once((f"127.{1 + number}.{num // 250 % 250}.{1 + num % 250}", port), _ANOTHER)
        num += 1
    _call_once(("127.0.0.1", port), _LAST)
    return 0, num


def _call_once(address: tuple[str, int], said: bytes) -> None:
    with socket.create_connection(address, timeout=CONNECT_TIMEOUT_S) as end:
        end.sendall(said)
        end.recv(1)


def _serve(listening: socket.socket) -> tuple[int, int]:
    num = 0
    while True:
        with listening.accept()[0] as end:
            said = end.recv(1)
        if said == _LAST:
            return 0, num
        num += 1
