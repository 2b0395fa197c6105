"""The bus: NATS behind one package. Nothing else imports nats; the README lists its faults and how each is handled."""

from .broker.errors import (
    BusError,
    ConnectionClosedError,
    ObjectBrokenError,
    ObjectMissingError,
    PermissionDeniedError,
    PublishError,
    SequenceRegressError,
    StaleWriterError,
    StreamFullError,
    StreamMissingError,
)
from .bus import Bus
from .discovery import Identity
from .objects.layout import ObjectInfo
from .objects.store import StoredObject
from .streams.broker_consumer import Start
from .streams.consumer import Consumer
from .streams.failover import FailoverWait
from .streams.message import BusMessage, StreamState

__all__ = [
    "Bus",
    "BusError",
    "BusMessage",
    "ConnectionClosedError",
    "Consumer",
    "FailoverWait",
    "Identity",
    "ObjectBrokenError",
    "ObjectInfo",
    "ObjectMissingError",
    "PermissionDeniedError",
    "PublishError",
    "SequenceRegressError",
    "StaleWriterError",
    "Start",
    "StoredObject",
    "StreamFullError",
    "StreamMissingError",
    "StreamState",
]
