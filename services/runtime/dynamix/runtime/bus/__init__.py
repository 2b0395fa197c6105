"""The bus: NATS behind one package. Nothing else imports nats; the README lists its faults and how each is handled."""

from .bus import Bus
from .errors import (
    BusError,
    ConnectionClosedError,
    PermissionDeniedError,
    PublishError,
    SequenceRegressError,
    StaleWriterError,
    StreamFullError,
    StreamMissingError,
)
from .read import Reader, Start
from .requests import BusMessage, FailoverWait, StreamState

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
