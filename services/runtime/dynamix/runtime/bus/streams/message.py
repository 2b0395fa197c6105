"""A message as stored, and what the broker says about it in its acknowledgement subject."""

from typing import NamedTuple

from .copies import StreamCopies

MESSAGE_ID = "Nats-Msg-Id"
SIGNED = "#"
"""Between the content's identity and what only its sender can know: no identity has it."""

_MESSAGE_ID_LINE = f"\r\n{MESSAGE_ID}:".lower().encode()
_V1_TOKENS = 9
_V2_MIN_TOKENS = 11


class BusMessage(NamedTuple):
    """A message from a stream; from core NATS the numbers are 0."""

    subject: str
    payload: bytes
    sequence: int
    """Its place in the stream."""
    timestamp_ns: int
    """When the broker stored it, since the Unix epoch."""
    num_pending: int
    """Messages for this reader that the stream still held when this one was sent: how far behind the reader is."""
    headers: bytes = b""
    """The headers of a delivery, not parsed: most readers have no use for them."""

    @property
    def message_id(self) -> str:
        """The content's identity in the headers, as `codec.message_id` gives it; empty when there is none."""
        start = self.headers.lower().find(_MESSAGE_ID_LINE)
        if start < 0:
            return ""
        value, _, _ = self.headers[start + len(_MESSAGE_ID_LINE) :].partition(b"\r\n")
        return value.strip().decode(errors="replace").partition(SIGNED)[0]


class StreamState(NamedTuple):
    """What a stream holds; `first_sequence` is one above `last_sequence` when it is empty."""

    first_sequence: int
    last_sequence: int
    num_messages: int
    num_bytes: int = 0
    span_s: float = 0.0
    """From the oldest to the newest message."""
    num_consumers: int = 0
    num_replicas: int = 1
    copies: StreamCopies = StreamCopies()
    """Empty where there is no cluster."""
    created: str = ""
    """When the stream was made: one that was deleted and made again has another time, and other messages."""


def parse_delivery(
    subject: bytes, payload: bytes, reply: bytes, headers: bytes | None = None
) -> tuple[int, BusMessage]:
    """The message, and the consumer's count of its deliveries from 1: a jump means that one was lost on the way.

    The reply subject is `$JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<consumer sequence>.<time>.<pending>`.
    The second form puts domain and account in front of the stream and may add a token at the end.

    A subject may hold any bytes but white space: what is not UTF-8 is replaced, and later refused as none of ours.

    Raises:
        ValueError: when it is neither.
    """
    tokens = reply.split(b".")
    if len(tokens) >= _V2_MIN_TOKENS:
        del tokens[2:4]
    elif len(tokens) != _V1_TOKENS:
        raise ValueError(f"{reply!r} is no acknowledgement subject of JetStream")
    return int(tokens[6]), BusMessage(
        subject.decode(errors="replace"), payload, int(tokens[5]), int(tokens[7]), int(tokens[8]), headers or b""
    )
