"""Bytes of a message and back: a 4-byte header (magic, version, kind), then msgpack, or zlib of it.

What only trainers send is compressed where it is large, and flagged in the header's kind: the broker closes the
connection of a trainer that sends more than `MAX_TRAINER_BYTES`, so that a flood of its largest messages delays others
little. The specification of a job of 10,000 ranks, 8 to a node, has up to 200 KiB without and 50 KiB with compression.

A decoded message is whole or refused: known version, the kind that its subject names, the identity that its subject
names, every field within its limits, every float finite.
"""

import math
import zlib
from typing import Any, NamedTuple, TypeVar

import msgspec

from . import subjects
from .messages import Message
from .subjects import BY_NAME, BY_STRUCT, KINDS, Kind

MAGIC = b"DX"
VERSION = 1
HEADER_BYTES = 4
MAX_MESSAGE_BYTES = 512 * 1024
"""Half of NATS's default limit: headers and growth have room."""
MAX_TRAINER_BYTES = 64 * 1024
COMPRESSED_FROM_BYTES = 16 * 1024
MAX_INFLATED_BYTES = 256 * 1024
MAX_INFLATION = 16
"""Bytes that one byte of a compressed message may become: bounds what a flood of them costs its receivers."""
_COMPRESSED = 0x80
"""Flag in the header's kind."""

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind.name: msgspec.msgpack.Decoder(kind.struct) for kind in KINDS}
_headers = {kind.struct: MAGIC + bytes((VERSION, kind.code)) for kind in KINDS}

M = TypeVar("M", bound=Message)


class MalformedMessageError(ValueError):
    """A message is refused; the error has the reason."""


def encode(message: Message) -> bytes:
    """Bytes of a message. Raises MalformedMessageError for a float that is not finite, or a message over its limit."""
    data = _headers[type(message)] + _encoder.encode(message)
    if bad := _non_finite_fields(message, data):
        raise MalformedMessageError(f"{type(message).__name__} has values that are not finite: {', '.join(bad[:8])}")
    limit = MAX_MESSAGE_BYTES
    if BY_STRUCT[type(message)].senders == ("trainer",):
        limit = MAX_TRAINER_BYTES
        if COMPRESSED_FROM_BYTES < len(data) <= MAX_INFLATED_BYTES:  # padded to the least size that may inflate so far
            packed = zlib.compress(data[HEADER_BYTES:], 1).ljust(len(data) // MAX_INFLATION, b"\0")
            data = data[: HEADER_BYTES - 1] + bytes((data[HEADER_BYTES - 1] | _COMPRESSED,)) + packed
    if len(data) > limit:
        raise MalformedMessageError(f"{type(message).__name__} of {len(data)} bytes is over {limit}")
    return data


def decode(expected: type[M], subject: str, payload: bytes) -> M:
    """The message of type `expected` in `payload`, as published on `subject`. The subject's identity counts.

    Raises:
        MalformedMessageError: when anything is wrong; the error has the reason.
    """
    message = decode_any(subject, payload)
    if not isinstance(message, expected):
        raise MalformedMessageError(f"{subject} carries a {type(message).__name__}, not a {expected.__name__}")
    return message


def decode_or_none(expected: type[M], subject: str, payload: bytes) -> M | None:
    """As `decode`; `None` for what it refuses."""
    try:
        return decode(expected, subject, payload)
    except MalformedMessageError:
        return None


def decode_any(subject: str, payload: bytes) -> Message:
    """The message in `payload`, of the kind that `subject` names. Raises MalformedMessageError as `decode`."""
    try:
        address = subjects.parse(subject)
    except ValueError as error:
        raise MalformedMessageError(str(error)) from error
    kind = BY_NAME[address.kind]
    if kind.senders == ("trainer",) and payload[HEADER_BYTES - 1 : HEADER_BYTES] >= bytes((_COMPRESSED,)):
        payload = _inflated(payload)
    _check_header(payload, kind)
    try:
        message: Message = _decoders[kind.name].decode(memoryview(payload)[HEADER_BYTES:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessageError(f"{kind.name}: {error}") from error
    if kind.name != "dead":  # the tokens of a dead letter are those of the message that it holds
        said = tuple(getattr(message, token) for token in kind.tokens)
        if said != address.tokens:
            raise MalformedMessageError(f"{subject} carries the identity {'.'.join(said)}")
    if bad := _non_finite_fields(message, payload):
        raise MalformedMessageError(f"{kind.name} has values that are not finite: {', '.join(bad[:8])}")
    return message


def message_id(message: Message) -> str:
    """The content's identity, for `Nats-Msg-Id`: equal for equal content, so that retries are harmless.

    An action's hash is part of it, since two arbitrators may differ about one window.
    """
    kind = BY_STRUCT[type(message)]
    parts = [getattr(message, name) for name in (*kind.tokens, *kind.identity)]
    return ":".join([kind.name, *(part.hex()[:16] if isinstance(part, bytes) else str(part) for part in parts)])


class Parcel(NamedTuple):
    """A message as it is published."""

    subject: str
    payload: bytes
    message_id: str


def parcel_of(message: Message) -> Parcel:
    """The message as it is published. Raises MalformedMessageError where a reader would not take it."""
    subject, payload = subjects.subject_of(message), encode(message)
    decode(type(message), subject, payload)
    return Parcel(subject, payload, message_id(message))


# --- finite floats

_TYPES, _EXPONENTS = b"\xca\xcb", b"\x7f\xff"
_SUSPICIOUS = bytes(1 if byte in _TYPES else 2 if byte in _EXPONENTS else 0 for byte in range(256))


def _non_finite_fields(message: Message, packed: bytes) -> list[str]:
    """Paths of the fields whose value is NaN or infinite, for example `rows[2].loss_sum`; empty if there are none.

    Such a float begins in msgpack with its type, then its sign and an exponent of ones. Most messages have no such
    bytes: 3 us for the window of a node of 8 ranks, where looking at every field takes thirty times as long.
    """
    found: list[str] = []
    if b"\1\2" in packed.translate(_SUSPICIOUS):
        _find(message, "", found)
    return found


def _find(value: Any, path: str, found: list[str]) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            found.append(path)
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            _find(getattr(value, name), f"{path}.{name}" if path else name, found)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _find(item, f"{path}[{index}]", found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _find(item, f"{path}[{key!r}]", found)


def _inflated(payload: bytes) -> bytes:
    """The message as it was before compression. Raises MalformedMessageError for what is not such, or too large."""
    limit, inflating = min(MAX_INFLATED_BYTES, MAX_INFLATION * len(payload)), zlib.decompressobj()
    try:
        body = inflating.decompress(memoryview(payload)[HEADER_BYTES:], limit)
    except zlib.error as error:
        raise MalformedMessageError(f"compressed, but not by zlib: {error}") from error
    if not inflating.eof:
        raise MalformedMessageError(f"compressed, and cut off or over the limit of {limit} bytes")
    return payload[: HEADER_BYTES - 1] + bytes((payload[HEADER_BYTES - 1] ^ _COMPRESSED,)) + body


def _check_header(payload: bytes, kind: Kind) -> None:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MalformedMessageError(f"{len(payload)} bytes are over the limit of {MAX_MESSAGE_BYTES}")
    if payload[:2] != MAGIC:
        raise MalformedMessageError("not a DYNAMIX message: it does not begin with DX")
    if len(payload) < HEADER_BYTES:
        raise MalformedMessageError("shorter than its header")
    if payload[2] != VERSION:
        raise MalformedMessageError(f"version {payload[2]} of the codec, this program reads {VERSION}")
    if payload[3] != kind.code:
        raise MalformedMessageError(f"the header's kind {payload[3]} is not {kind.name}")
