"""The bus: NATS behind one package. Nothing else imports nats; the README says what we do about each of its traps."""

from .address import check_url
from .bus import Bus
from .consumer import Consumer
from .errors import (
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
from .handled import HandlingStatistics
from .message import BusMessage, StreamState
from .micro import Identity
from .object_layout import ObjectInfo
from .objects import StoredObject
from .position import ALL, LAST_PER_SUBJECT, NEW, Start
from .subscription import Subscription

__all__ = [
    "ALL",
    "LAST_PER_SUBJECT",
    "NEW",
    "Bus",
    "BusError",
    "BusMessage",
    "ConnectionClosedError",
    "Consumer",
    "HandlingStatistics",
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
    "Subscription",
    "check_url",
]
