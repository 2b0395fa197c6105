"""The bus: NATS behind one package. Nothing else imports nats; the README lists its faults and how each is handled."""

from .broker.errors import (
    BusError,
    ConnectionClosedError,
    PermissionDeniedError,
    PublishError,
    SequenceRegressError,
    StaleWriterError,
    StreamFullError,
    StreamMissingError,
)
from .bus import Bus
from .streams.failover import FailoverWait
from .streams.message import BusMessage, StreamState
from .streams.reader import Reader, Start

__all__ = [
    "Bus",
    "BusError",
    "BusMessage",
    "ConnectionClosedError",
    "FailoverWait",
    "PermissionDeniedError",
    "PublishError",
    "Reader",
    "SequenceRegressError",
    "StaleWriterError",
    "Start",
    "StreamFullError",
    "StreamMissingError",
    "StreamState",
]
