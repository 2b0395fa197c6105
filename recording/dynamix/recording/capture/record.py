"""What a capture holds: a header, records, and at the end what should have been read."""

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from dynamix.schemas.fields import Token
from dynamix.schemas.streams import ACTIONS, FEED, JOBS

from .fingerprint import Fingerprint

STREAMS = (JOBS.name, FEED.name, ACTIONS.name)
"""The streams of a job, in the order in which messages of the same nanosecond stand in a capture."""

MAX_SUBJECT_BYTES = 255
MAX_MESSAGE_ID_BYTES = 1024
MAX_PAYLOAD_BYTES = 1 << 20
"""The broker's own limit for a message; ours have at most half of it."""

MAX_STREAMS = 256
"""A record refers to its stream by one byte."""
StreamName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]

EndReason = Literal["ended", "stored", "windows", "interrupted"]
"""Why a capture ends: with the job, with what was stored when it began, after so many windows, or by a signal."""


class Record(NamedTuple):
    """One message as the broker kept it."""

    stream: str
    sequence: int
    """Its place in the stream."""
    timestamp_ns: int
    """When the broker stored it, since the Unix epoch."""
    subject: str
    message_id: str
    """`Nats-Msg-Id`, the one header of ours that means something; empty where there was none."""
    payload: bytes


class CaptureHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture says of itself before the first record."""

    job: Token
    created: Annotated[str, Meta(pattern=r"^[0-9T:.+Z-]{10,40}\Z")]
    """When the capture began, UTC, RFC 3339."""
    fingerprint: Fingerprint
    """Of the program that captured; a replay is byte-identical where its own is the same."""
    streams: Annotated[tuple[StreamName, ...], Meta(min_length=1, max_length=MAX_STREAMS)] = STREAMS
    """Names that the records refer to."""


class StreamRange(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture holds of one stream."""

    first_sequence: int
    last_sequence: int
    num_records: int


class CaptureEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole capture says at its end."""

    reason: EndReason
    num_records: int
    ranges: dict[str, StreamRange]
    """By stream; one without records has no range."""
    num_left_out: int = 0
    """Messages that are larger than a record can be: none of ours are."""


def fits(record: Record) -> bool:
    """Whether a record is within the limits of the format."""
    return (
        len(record.payload) <= MAX_PAYLOAD_BYTES
        and len(record.subject.encode()) <= MAX_SUBJECT_BYTES
        and len(record.message_id.encode()) <= MAX_MESSAGE_ID_BYTES
    )
