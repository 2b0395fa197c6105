"""What a rank and the runner say to each other: frames on a Unix socket, which every network namespace reaches."""

import asyncio
import socket
import struct
from typing import TypeVar

import msgspec

from .arms import TargetArm

T = TypeVar("T")
LENGTH = struct.Struct("<I")


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank runs, and what it trains."""

    rank: int
    world_size: int
    arm: TargetArm
    seed: int
    grid_s: float
    namespace: str
    cgroup_procs: list[str]
    environ: dict[str, str]
    socket: str
    log: str


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """A rank is ready, and waits for an answer to begin."""

    rank: int


class CheckIn(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0 is at a point of the grid of training time, and all ranks wait for the answer."""

    trained_s: float
    num_steps: int
    num_samples: int
    local_batch_sizes: tuple[int, ...]
    parameters: bytes
    """float32, in the order of the model's parameters."""


class CheckInAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Go on, or stop."""

    stop: bool = False
    accuracy: float = 0.0


def exchange(link: socket.socket, message: Attached | CheckIn) -> CheckInAnswer:
    """Send a message and wait for its answer.

    Raises:
        EOFError: when the runner is gone.
    """
    payload = msgspec.msgpack.encode(message)
    link.sendall(LENGTH.pack(len(payload)) + payload)
    (length,) = LENGTH.unpack(_received(link, LENGTH.size))
    return msgspec.msgpack.decode(_received(link, length), type=CheckInAnswer)


async def read_frame(reader: asyncio.StreamReader, kind: type[T]) -> T:
    """The next message of a rank; raises asyncio.IncompleteReadError when it ended."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)


def write_frame(writer: asyncio.StreamWriter, answer: CheckInAnswer) -> None:
    """CheckInAnswer a rank."""
    payload = msgspec.msgpack.encode(answer)
    writer.write(LENGTH.pack(len(payload)) + payload)


def _received(link: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        part = link.recv(length - len(data))
        if not part:
            raise EOFError("the runner closed the connection")
        data += part
    return bytes(data)
