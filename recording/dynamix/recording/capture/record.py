"""Records of a capture: a header, records in one order, an end with their number. And the errors of reading it."""

import datetime as dt
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import msgspec
from msgspec import Meta

from dynamix.schemas import codec
from dynamix.schemas.codec import MalformedMessageError
from dynamix.schemas.messages.fields import Token
from dynamix.schemas.streams import ACTIONS, FEED, JOBS, REPORTS

from .fingerprint import Fingerprint, fingerprint

STREAMS = (JOBS.name, REPORTS.name, FEED.name, ACTIONS.name)
"""The streams of a job, in the order in which messages of the same nanosecond stand in a capture."""

MAX_SUBJECT_BYTES = 255
MAX_MESSAGE_ID_BYTES = 1024
MAX_PAYLOAD_BYTES = 1 << 20
"""The broker's limit for a message; messages of DYNAMIX have at most half of it."""

MAX_STREAMS = 256
"""A record refers to its stream by one byte."""
StreamName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]

FOREVER_NS = 1 << 63
"""Later than any message."""

EndReason = Literal["ended", "stored", "windows", "interrupted"]
"""Why a capture ends: the job has ended, everything stored was read, enough windows were read, or a signal came."""


class Record(NamedTuple):
    """One message as the broker stored it."""

    stream: str
    sequence: int
    """Its number in the stream."""
    timestamp_ns: int
    """When the broker stored it, since the Unix epoch."""
    subject: str
    message_id: str
    """The header `Nats-Msg-Id`; empty where there was none."""
    payload: bytes


class WindowKey(NamedTuple):
    """A window of a generation; keys compare in the order of time."""

    generation: int
    window: int

    def __str__(self) -> str:
        return f"window {self.window} of generation {self.generation}"


class CaptureHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a capture before its first record."""

    job: Token
    created: Annotated[str, Meta(pattern=r"^[0-9T:.+Z-]{10,40}\Z")]
    """When the capture began, UTC, RFC 3339."""
    fingerprint: Fingerprint
    """Fingerprint of the program that captured; a replay is byte-identical where its own is equal."""
    streams: Annotated[tuple[StreamName, ...], Meta(min_length=1, max_length=MAX_STREAMS)] = STREAMS
    """Names of streams; a record refers to them by index."""

    @classmethod
    def of(cls, job: str) -> Self:
        """The header of a capture that this program makes of a job now."""
        created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(job=job, created=created, fingerprint=fingerprint())


class StreamRange(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences that a capture has of one stream."""

    first_sequence: int
    last_sequence: int
    num_records: int


class CaptureEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Summary at the end of a complete capture."""

    reason: EndReason
    num_records: int
    ranges: dict[str, StreamRange]
    """By stream; a stream without records has no range."""
    num_left_out: int = 0
    """Messages that are larger than a record may be; no message of DYNAMIX is."""


def fits(record: Record) -> bool:
    """Whether a record is within the limits of the format."""
    return (
        len(record.payload) <= MAX_PAYLOAD_BYTES
        and len(record.subject.encode()) <= MAX_SUBJECT_BYTES
        and len(record.message_id.encode()) <= MAX_MESSAGE_ID_BYTES
    )


def kind_of(record: Record) -> str:
    """The kind of message that its subject names."""
    return kind_of_subject(record.subject)


@lru_cache(maxsize=16384)  # the same few subjects come with every window
def kind_of_subject(subject: str) -> str:
    """The kind of message in a subject; empty when it names none."""
    return subject.split(".", 3)[2] if subject.count(".") > 2 else ""


def identity_of(record: Record) -> str:
    """The identity of a record's content, as `codec.message_id` gives it; empty when the record cannot be decoded.

    It is the record's message id; only a record without one is decoded.
    """
    if record.message_id:
        return record.message_id
    try:
        return codec.message_id(codec.decode_any(record.subject, record.payload))
    except MalformedMessageError:
        return ""


def window_key_of(identity: str) -> WindowKey | None:
    """The window in an identity that ends in generation and window; `None` for other identities."""
    parts = identity.rsplit(":", 2)
    if len(parts) < 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return WindowKey(int(parts[1]), int(parts[2]))


class RecordMerge:
    """Takes records stream by stream and returns them in one order.

    Within a stream the order is the broker's sequence; decisions depend on that of FEED. Between streams there is only
    the broker's time: the earlier message comes first, and at the same nanosecond that of the first stream in
    `STREAMS`. Where the broker's clock was set back, a stream's later messages count as stored at the latest time seen
    in that stream. The order depends only on what is stored, so that two captures of a job agree.
    """

    def __init__(self, streams: Sequence[str] = STREAMS) -> None:
        self._ranks = {stream: rank for rank, stream in enumerate(streams)}
        self._queues: dict[str, deque[tuple[int, int, Record]]] = {stream: deque() for stream in streams}
        self._newest_ns = dict.fromkeys(streams, 0)

    def add_record(self, record: Record) -> None:
        """Queue the next record of its stream."""
        newest = max(self._newest_ns[record.stream], record.timestamp_ns)
        self._newest_ns[record.stream] = newest
        self._queues[record.stream].append((newest, self._ranks[record.stream], record))

    def newest_ns(self, stream: str) -> int:
        """The latest time among the records of a stream; 0 before its first record."""
        return self._newest_ns[stream]

    def pop_until(self, time_ns: int = FOREVER_NS) -> Iterator[Record]:
        """Remove and return the records up to a time, that time included, in order.

        The caller has added every record of every stream that the broker stored up to then.
        """
        while waiting := [queue for queue in self._queues.values() if queue]:
            earliest = min(waiting, key=lambda queue: queue[0][:2])
            if earliest[0][0] > time_ns:
                return
            yield earliest.popleft()[2]


class CaptureError(ValueError):
    """A file that is no capture, or a damaged one; the text names the damage and how many records are good.

    Attributes:
        block: index of the block that cannot be used: 0 is the header, -1 where there is no header.
        offset: byte at which that block begins.
        num_records: records before it; all of them are good.
    """

    def __init__(self, path: Path, reason: str, *, block: int = -1, offset: int = 0, num_records: int = 0) -> None:
        location = f" at block {block} (byte {offset}): " if block >= 0 else ": "
        good = f"; the {num_records} records before it are good" if block > 0 else ""
        super().__init__(f"{path}{location}{reason}{good}")
        self.block = block
        self.offset = offset
        self.num_records = num_records


class CutOffError(CaptureError):
    """A capture without its end: the writer was killed, or the file was truncated. Its records are good."""
