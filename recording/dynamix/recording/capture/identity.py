"""What a record is about - kind, identity, window - without decoding it."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dynamix.schemas import codec
from dynamix.schemas.codec import MalformedMessageError

from .reader import records
from .record import Record


class WindowKey(NamedTuple):
    """A window of a generation; keys compare in the order of time."""

    generation: int
    window: int

    def __str__(self) -> str:
        return f"window {self.window} of generation {self.generation}"


def kind_of(record: Record) -> str:
    """The kind of message that the subject names."""
    return _kind(record.subject)


@lru_cache(maxsize=16384)  # the same few subjects come with every window
def _kind(subject: str) -> str:
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


def first_generation(path: Path) -> int:
    """The first generation that a capture has a message of, 0 when it has none. Raises as `records`."""
    found = (window_key_of(identity_of(record)) for record in records(path))
    return next((key.generation for key in found if key is not None), 0)
