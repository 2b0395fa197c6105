"""Loopback traffic of several kinds, between two processes in the control group that is measured."""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Literal, NamedTuple

from bench.harness.rounds import Timed, Timing

from dynamix.runtime.die_with_parent import begin_worker

Way = Literal["stream", "echo", "datagram", "connection"]

SO_COOKIE = 57
REPLY_TIMEOUT_S = 60.0
QUIET_S = 0.3
"""Datagrams may be lost, the last one too: the receiver stops after silence of this length."""
_LAST, _ANOTHER = b"\0", b"\1"
CONNECT_TIMEOUT_S = 20.0

_sockets: list[socket.socket] = []
"""Those of this process, which is one of the two."""


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


class Endpoints:
    """Both processes: `with endpoints(...)`. An error in one of them is raised here."""

    def __init__(self, receiver: Pool, sender: Pool) -> None:
        self._receiver, self._sender = receiver, sender
        self._port = 0

    def open(self, kind: TrafficKind) -> list[int]:
        """Connect; the cookies of all sockets. Those that only exist to be opened and closed come later."""
        self._port = self._receiver.apply_async(_listen, (kind,)).get(REPLY_TIMEOUT_S)
        cookies: list[int] = self._sender.apply_async(_connect, (kind, self._port)).get(REPLY_TIMEOUT_S)
        return cookies + list(self._receiver.apply_async(_accept, (kind,)).get(REPLY_TIMEOUT_S))

    def run(self, kind: TrafficKind, duration_s: float) -> Timing:
        """Send for so long over what is open, and close it; CPU time is of both processes."""
        receiving: AsyncResult[Timing] = self._receiver.apply_async(_receive, (kind,))
        sending: AsyncResult[Timing] = self._sender.apply_async(_send_for, (kind, self._port, duration_s))
        received, sent = receiving.get(REPLY_TIMEOUT_S), sending.get(REPLY_TIMEOUT_S)
        self.close()
        return _timing(kind, sent, received)

    def close(self) -> None:
        """Close whatever is open."""
        for side in (self._sender, self._receiver):
            side.apply_async(_close).get(REPLY_TIMEOUT_S)

    def block(self, kind: TrafficKind, duration_s: float) -> Timing:
        """Connect, send, close."""
        self.open(kind)
        return self.run(kind, duration_s)


@contextlib.contextmanager
def endpoints(group: Path) -> Iterator[Endpoints]:
    """Both processes, which end with the context."""
    context = multiprocessing.get_context("spawn")
    with (
        context.Pool(1, _begin_side, (group, os.getpid())) as receiver,
        context.Pool(1, _begin_side, (group, os.getpid())) as sender,
    ):
        yield Endpoints(receiver, sender)


def _begin_side(group: Path, parent: int) -> None:
    begin_worker(parent)
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _timing(kind: TrafficKind, sent: Timing, received: Timing) -> Timing:
    arrived = received if kind.way in ("stream", "datagram") else sent
    items = arrived.num_bytes / kind.item_bytes if kind.item_bytes else arrived.num_items
    wall_s = received.wall_s if kind.way == "stream" else sent.wall_s
    return Timing(wall_s, sent.cpu_s + received.cpu_s, items, arrived.num_bytes)


def _listen(kind: TrafficKind) -> int:
    """Open the port to which the sender shall connect."""
    listening = _new_socket(kind)
    _sockets[:] = [listening]
    listening.bind(("0.0.0.0" if kind.way == "connection" else "127.0.0.1", 0))
    if kind.way != "datagram":
        listening.listen(1024)
    return int(listening.getsockname()[1])


def _accept(kind: TrafficKind) -> list[int]:
    """Accept the sender's connections; their cookies."""
    if kind.way in ("stream", "echo"):
        with _sockets.pop() as listening:
            _sockets[:] = [listening.accept()[0] for _ in range(kind.num_streams)]
    return [_cookie(end) for end in _sockets]


def _receive(kind: TrafficKind) -> Timing:
    """Receive until the sender ends; it knows for how long."""
    works = {"stream": _drain, "echo": _echo, "datagram": _drain_datagrams, "connection": _serve}
    ends = _sockets * (kind.num_streams if kind.way == "connection" else 1)
    return _timed([partial(works[kind.way], end) for end in ends])


def _connect(kind: TrafficKind, port: int) -> list[int]:
    if kind.way != "connection":
        _sockets[:] = [_connected(kind, port) for _ in range(kind.num_streams)]
    return [_cookie(end) for end in _sockets]


def _send_for(kind: TrafficKind, port: int, duration_s: float) -> Timing:
    until_s = time.monotonic() + duration_s
    if kind.way == "connection":
        return _timed([partial(_open_and_close, port, at, until_s) for at in range(kind.num_streams)])
    work = _exchange if kind.way == "echo" else _send
    return _timed([partial(work, end, bytes(kind.chunk_bytes), until_s) for end in _sockets])


def _close() -> None:
    while _sockets:
        _sockets.pop().close()


def _cookie(end: socket.socket) -> int:
    """The kernel's name for a socket."""
    return int.from_bytes(end.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)


def _connected(kind: TrafficKind, port: int) -> socket.socket:
    end = _new_socket(kind)
    end.connect(("127.0.0.1", port))
    if kind.way == "echo":
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def _new_socket(kind: TrafficKind) -> socket.socket:
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if kind.way == "datagram" else socket.SOCK_STREAM)
    if kind.max_segment_bytes is not None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, kind.max_segment_bytes)
    return end


def _timed(calls: Sequence[Callable[[], tuple[int, int]]]) -> Timing:
    """Run a thread for each; sending and receiving release the interpreter. Items are messages.

    CPU time is that of this process; nearly all that the kernel does for it on loopback is charged to it.
    """
    with Timed() as done, ThreadPoolExecutor(len(calls)) as pool:
        found = [future.result() for future in [pool.submit(call) for call in calls]]
    num_bytes, num_messages = (sum(column) for column in zip(*found, strict=True))
    return done.timing._replace(num_items=num_messages, num_bytes=num_bytes)


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
