"""Which window a record is about, told without decoding it."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from dynamix.recording.capture import Record, records
from dynamix.schemas import codec
from dynamix.schemas.codec import MalformedMessageError


class Place(NamedTuple):
    """A window of a generation; places have the order of time."""

    generation: int
    window: int

    def __str__(self) -> str:
        return f"window {self.window} of generation {self.generation}"


def kind_of(record: Record) -> str:
    """The kind of message that the subject names."""
    return _kind(record.subject)


@lru_cache(maxsize=16384)  # the same few come with every window
def _kind(subject: str) -> str:
    return subject.split(".", 3)[2] if subject.count(".") > 2 else ""


def identity_of(record: Record) -> str:
    """The content's identity, as `codec.message_id` gives it; empty when the record cannot be decoded.

    A capture has it from the headers, so that nothing is decoded for it; only what came without is.
    """
    if record.message_id:
        return record.message_id
    try:
        return codec.message_id(codec.decode_any(record.subject, record.payload))
    except MalformedMessageError:
        return ""


def place_of(identity: str) -> Place | None:
    """Where an identity that ends in generation and window belongs; `None` for others."""
    parts = identity.rsplit(":", 2)
    if len(parts) < 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return Place(int(parts[1]), int(parts[2]))


def first_generation(path: Path) -> int:
    """The first generation that a capture has something of, 0 when it has nothing. Raises as `records`."""
    found = (place_of(identity_of(record)) for record in records(path))
    return next((place.generation for place in found if place is not None), 0)
