"""Captures for tests: records of every stream, and files of them."""

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support import examples

from dynamix.cli.commands.capture import Source
from dynamix.recording.capture import CaptureEnd, CaptureHeader, CaptureWriter, EndReason, Record
from dynamix.recording.fingerprint import Fingerprint
from dynamix.runtime.bus import Bus
from dynamix.schemas.codec import encode, message_id
from dynamix.schemas.messages import Message
from dynamix.schemas.subjects import BY_STRUCT, subject_of

STARTED_NS = 1_700_000_000_000_000_000
FINGERPRINT = Fingerprint(
    dynamix="0.1.0", code="0" * 64, python="3.11.7", numpy="2.4.6", machine="x86_64", cpu="GenuineIntel/6/143", simd=()
)


def header(job: str = examples.JOB) -> CaptureHeader:
    """A header with the fingerprint of a program that does not exist."""
    return CaptureHeader(job=job, created="2026-11-20T12:00:00Z", fingerprint=FINGERPRINT)


def record(message: Message, sequence: int, timestamp_ns: int | None = None) -> Record:
    """The message as the broker would keep it, a millisecond a sequence."""
    return Record(
        stream=BY_STRUCT[type(message)].carrier,
        sequence=sequence,
        timestamp_ns=STARTED_NS + sequence * 1_000_000 if timestamp_ns is None else timestamp_ns,
        subject=subject_of(message),
        message_id=message_id(message),
        payload=encode(message),
    )


def records_of(messages: Iterable[Message]) -> list[Record]:
    """Records of messages in one order, each with the next sequence: as on a broker whose streams count together."""
    return [record(message, sequence) for sequence, message in enumerate(messages, start=1)]


async def capture_job(bus: Bus, job: str, path: Path, *, past: bool) -> CaptureEnd:
    """Capture a job from a broker: what is stored now, or until the job has ended."""
    source = Source(bus, job, past=past, stop=asyncio.Event())
    with CaptureWriter(path, CaptureHeader.of(job)) as writer:
        async with contextlib.aclosing(source.batches()) as batches:
            async for batch in batches:
                for one in batch:
                    writer.write_record(one)
        return writer.finish(source.reason)


def write(path: Path, records: Sequence[Record], *, reason: EndReason = "ended", job: str = examples.JOB) -> Path:
    """Write a complete capture of some records."""
    with CaptureWriter(path, header(job)) as writer:
        for one in records:
            writer.write_record(one)
        writer.finish(reason)
    return path
