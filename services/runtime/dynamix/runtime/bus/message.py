"""A message as stored, and what the broker says about it in its acknowledgement subject."""

from typing import NamedTuple

_V1_TOKENS = 9
_V2_MIN_TOKENS = 11
_V2_SHIFT = 2


class Message(NamedTuple):
    """A message from a stream; from core NATS the numbers are 0."""

    subject: str
    payload: bytes
    sequence: int
    """Its place in the stream."""
    timestamp_ns: int
    """When the broker stored it, since the Unix epoch."""
    num_pending: int
    """Messages of this consumer that the stream still held when this one was sent: how far behind the reader is."""


class StreamState(NamedTuple):
    """What a stream holds; `first_sequence` is one above `last_sequence` when it is empty."""

    first_sequence: int
    last_sequence: int
    num_messages: int


class Delivery(NamedTuple):
    """What the reply subject of a delivered message says."""

    sequence: int
    consumer_sequence: int
    """Counts deliveries of the consumer from 1: a jump means that one was lost on the way."""
    timestamp_ns: int
    num_pending: int


def parse_delivery(reply: str) -> Delivery:
    """Take an acknowledgement subject apart.

    It is `$JS.ACK.<stream>.<consumer>.<deliveries>.<sequence>.<consumer sequence>.<time>.<pending>`.
    The second form puts domain and account in front of the stream and may add a token at the end.

    Raises:
        ValueError: when it is neither.
    """
    tokens = reply.split(".")
    shift = 0 if len(tokens) == _V1_TOKENS else _V2_SHIFT
    if (shift and len(tokens) < _V2_MIN_TOKENS) or not reply.startswith("$JS.ACK."):
        raise ValueError(f"{reply!r} is no acknowledgement subject of JetStream")
    return Delivery(int(tokens[5 + shift]), int(tokens[6 + shift]), int(tokens[7 + shift]), int(tokens[8 + shift]))
