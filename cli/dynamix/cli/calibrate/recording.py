"""Recordings: stored messages in a file, each with its subject.

`DXR` and a version byte, then for every message two lengths, little-endian, of 2 and 4 bytes, the subject in UTF-8 and
the encoded message as it was published.
"""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from dynamix.cli.errors import CommandError
from dynamix.schemas.codec import MAX_MESSAGE_BYTES, MalformedMessageError, decode_any
from dynamix.schemas.messages import Job, MetricWindow

MAGIC = b"DXR\x01"
_LENGTHS = struct.Struct("<HI")


class Record(NamedTuple):
    """One message as the bus kept it."""

    subject: str
    payload: bytes


class Recording(NamedTuple):
    """What calibration needs of a job."""

    job: Job | None
    """Its newest specification."""
    windows: list[MetricWindow]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write a recording.

    Raises:
        CommandError: when the file cannot be written.
    """
    parts = [MAGIC]
    for record in records:
        subject = record.subject.encode()
        parts += [_LENGTHS.pack(len(subject), len(record.payload)), subject, record.payload]
    try:
        path.write_bytes(b"".join(parts))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path) -> list[Record]:
    """Read a recording.

    Raises:
        CommandError: when the file cannot be read, or is no recording or not a whole one.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    if content[: len(MAGIC)] != MAGIC:
        raise CommandError(f"{path} is no recording: `dynamix calibrate JOB --save FILE` makes one")
    records, at = [], len(MAGIC)
    while at < len(content):
        record, at = _record(path, content, at)
        records.append(record)
    return records


def understood(records: Sequence[Record], source: str) -> Recording:
    """The messages of a recording.

    Raises:
        CommandError: when one cannot be decoded, naming the `source`, or there are windows of several jobs.
    """
    recording = Recording(None, [])
    for record in records:
        try:
            message = decode_any(record.subject, record.payload)
        except MalformedMessageError as error:
            raise CommandError(f"{source} holds what cannot be decoded: {error}") from error
        if isinstance(message, Job):
            recording = recording._replace(job=message)
        elif isinstance(message, MetricWindow):
            recording.windows.append(message)
    if len(jobs := {window.job for window in recording.windows}) > 1:
        raise CommandError(f"{source} holds windows of several jobs ({', '.join(sorted(jobs))}): record one only")
    return recording


def _record(path: Path, content: bytes, at: int) -> tuple[Record, int]:
    """The record that begins at a place, and where the next one does."""
    start = at + _LENGTHS.size
    if start > len(content):
        raise CommandError(f"{path} ends within a message, at byte {at}: record it again")
    subject_bytes, payload_bytes = _LENGTHS.unpack_from(content, at)
    middle, end = start + subject_bytes, start + subject_bytes + payload_bytes
    if payload_bytes > MAX_MESSAGE_BYTES or end > len(content):
        raise CommandError(f"{path} ends within a message, at byte {at}: record it again")
    subject = content[start:middle].decode(errors="replace")
    return Record(subject, content[middle:end]), end
