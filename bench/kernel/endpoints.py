"""The sending and the receiving process, in the control group that is measured."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any

from bench.harness.rounds import Timing
from bench.kernel.groups import join
from bench.kernel.traffic import Receiver, Sender, Side, TrafficKind

from dynamix.runtime.die_with_parent import begin_worker

REPLY_TIMEOUT_S = 60.0

_sides: list[Side] = []
"""In a process of its own: its side of the traffic."""


class Endpoints:
    """Both processes: `with endpoints(...)`. An error in one of them is raised here."""

    def __init__(self, receiver: Pool, sender: Pool) -> None:
        self._receiver, self._sender = receiver, sender

    def open(self, kind: TrafficKind) -> list[int]:
        """Connect; the cookies of all sockets."""
        port = _ask(self._receiver, "listen", kind).get(REPLY_TIMEOUT_S)
        cookies: list[int] = _ask(self._sender, "connect", kind, port).get(REPLY_TIMEOUT_S)
        return cookies + list(_ask(self._receiver, "accept", kind).get(REPLY_TIMEOUT_S))

    def run(self, kind: TrafficKind, duration_s: float) -> Timing:
        """Send for so long over what is open, and close it; CPU time is of both processes."""
        sides = [_ask(side, "run", kind, duration_s) for side in (self._receiver, self._sender)]
        received, sent = (side.get(REPLY_TIMEOUT_S) for side in sides)
        self.close()
        return _timing(kind, sent, received)

    def close(self) -> None:
        """Close whatever is open."""
        for side in (self._sender, self._receiver):
            _ask(side, "close").get(REPLY_TIMEOUT_S)

    def block(self, kind: TrafficKind, duration_s: float) -> Timing:
        """Connect, send, close."""
        self.open(kind)
        return self.run(kind, duration_s)


@contextlib.contextmanager
def endpoints(group: Path) -> Iterator[Endpoints]:
    """Both processes, which end with the context."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        receiver, sender = (
            stack.enter_context(context.Pool(1, _begin_side, (side, group, os.getpid()))) for side in (Receiver, Sender)
        )
        yield Endpoints(receiver, sender)


def _timing(kind: TrafficKind, sent: Timing, received: Timing) -> Timing:
    arrived = received if kind.way in ("stream", "datagram") else sent
    items = arrived.num_bytes / kind.item_bytes if kind.item_bytes else arrived.num_items
    wall_s = received.wall_s if kind.way == "stream" else sent.wall_s
    return Timing(wall_s, sent.cpu_s + received.cpu_s, items, arrived.num_bytes)


def _ask(process: Pool, method: str, *arguments: object) -> "AsyncResult[Any]":
    return process.apply_async(_do, (method, *arguments))


def _begin_side(side: type[Side], group: Path, parent: int) -> None:
    begin_worker(parent)
    join(group)
    _sides.append(side())


def _do(method: str, *arguments: object) -> Any:
    return getattr(_sides[0], method)(*arguments)
