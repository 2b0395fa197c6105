"""The sending and the receiving process, in the control group that is measured, told what to do over pipes."""

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from bench.kernel.groups import join
from bench.kernel.traffic import Done, Receiver, Sender, Workload

REPLY_TIMEOUT_S = 60.0


class EndpointError(RuntimeError):
    """A process of the benchmark failed; its traceback is above."""


class Block(NamedTuple):
    """Some traffic, and what it took."""

    num_items: float
    num_bytes: int
    wall_s: float
    cpu_s: float
    """Of both processes."""


class Endpoints:
    """Both processes: `with endpoints(...)`."""

    def __init__(self, receiver: "_Remote", sender: "_Remote") -> None:
        self._receiver, self._sender = receiver, sender

    def open(self, workload: Workload) -> list[int]:
        """Connect; the cookies of all sockets."""
        port = self._receiver.call("listen", workload)
        cookies: list[int] = self._sender.call("connect", workload, port)
        return cookies + list(self._receiver.call("accept"))

    def run(self, workload: Workload, duration_s: float) -> Block:
        """Send for so long over what is open, and close it."""
        self._receiver.ask("run", duration_s)
        sent: Done = self._sender.call("run", duration_s)
        received: Done = self._receiver.answer()
        self.close()
        return _block(workload, sent, received)

    def close(self) -> None:
        """Close whatever is open."""
        self._sender.call("close")
        self._receiver.call("close")

    def block(self, workload: Workload, duration_s: float) -> Block:
        """Connect, send, close."""
        self.open(workload)
        return self.run(workload, duration_s)


@contextlib.contextmanager
def endpoints(group: Path) -> Iterator[Endpoints]:
    """Both processes, which end with the context."""
    with _started(Receiver, group) as receiver, _started(Sender, group) as sender:
        yield Endpoints(receiver, sender)


def _block(workload: Workload, sent: Done, received: Done) -> Block:
    arrived = received if workload.kind in ("stream", "datagram") else sent
    items = arrived.num_bytes / workload.item_bytes if workload.item_bytes else arrived.num_messages
    wall_s = received.wall_s if workload.kind == "stream" else sent.wall_s
    return Block(items, arrived.num_bytes, wall_s, sent.cpu_s + received.cpu_s)


class _Remote:
    """An object in another process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def ask(self, method: str, *arguments: object) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        try:
            if self._pipe.poll(REPLY_TIMEOUT_S):
                return self._pipe.recv()
        except EOFError:
            pass
        raise EndpointError("a process that sends or receives has failed: see above")

    def call(self, method: str, *arguments: object) -> Any:
        self.ask(method, *arguments)
        return self.answer()


@contextlib.contextmanager
def _started(kind: type[Receiver] | type[Sender], group: Path) -> Iterator[_Remote]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(kind, group, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield _Remote(ours)
    finally:
        ours.close()
        process.terminate()
        process.join()


def _serve(kind: type[Receiver] | type[Sender], group: Path, pipe: Connection) -> None:
    """Do as told until nobody is there to tell."""
    join(group)
    side = kind()
    with contextlib.suppress(EOFError), pipe:
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(side, method)(*arguments))
