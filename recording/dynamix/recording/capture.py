"""Captures: what the broker stored of one job, in a file of frames with checksums that is read block by block.

    with CaptureWriter(path, CaptureHeader.of(job)) as writer:
        writer.write_record(record)

    for record in records(path):  # in the order in which the broker stored them
        ...

A file is `MAGIC`, a version byte, then frames: a header, blocks of records, an end. Numbers are little-endian.

    frame    marker (8 bytes), length of the body (4), CRC-32 of the body (4), body
    body     zlib of msgpack: a CaptureHeader (map), a list of Records (arrays), or a CaptureEnd (map)

A reader stops at the first damaged frame and names its byte; the records before it are good. Lengths are checked before
memory is allocated. Flushed records stay readable when the writer is killed. A change of the format needs a new
`VERSION`.
"""

import datetime as dt
import heapq
import os
import struct
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, Self

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.input_files import check_regular
from dynamix.schemas.codec import MalformedMessageError, decode_any
from dynamix.schemas.messages import Message
from dynamix.schemas.messages.allocation import Token
from dynamix.schemas.streams import ACTIONS, FEED, JOBS, REPORTS

from .fingerprint import Fingerprint, fingerprint

MAGIC = b"\x89DXC\r\n\x1a\n"
"""Not text, and damaged by any tool that converts line ends."""
VERSION = 3
PREAMBLE = MAGIC + bytes((VERSION,))
MARKER = b"\x89DXF\r\n\x1a\n"
FRAME = struct.Struct("<8sII")
BLOCK_BYTES = 16 * 1024
"""A block is closed when its records have this many bytes."""
MAX_FRAME_BYTES = (1 << 20) + 4 * BLOCK_BYTES
"""Limit of a body, packed and unpacked. The last record of a block may be a large one: the broker takes up to 1 MiB."""
RECORD_BYTES = 32
"""Size of the numbers and lengths of a record, about."""

STREAMS = (JOBS.name, REPORTS.name, FEED.name, ACTIONS.name)
"""The streams of a job, in the order in which messages of the same nanosecond stand in a capture."""
FOREVER_NS = 1 << 63

EndReason = Literal["ended", "stored", "interrupted"]
"""Reason for the end of a capture: the job has ended, everything stored was read, or a signal came."""


class WindowKey(NamedTuple):
    """A window of a generation; keys compare in the order of time."""

    generation: int
    window: int

    def __str__(self) -> str:
        return f"window {self.window} of generation {self.generation}"


class Record(NamedTuple):
    """One message as the broker stored it."""

    stream: str
    sequence: int
    """Its number in the stream."""
    timestamp_ns: int
    """When the broker stored it, since the Unix epoch."""
    subject: str
    message_id: str
    """The header `Nats-Msg-Id`; empty where there was none."""
    payload: bytes

    @property
    def kind(self) -> str:
        """The kind of message that its subject names; empty when it names none."""
        return kind_of(self.subject)

    @property
    def key(self) -> WindowKey | None:
        """The window that it is about, by its message id; `None` for actions, events and other messages."""
        return window_key_of(self.message_id)


@lru_cache(maxsize=16384)  # the same few subjects come with every window
def kind_of(subject: str) -> str:
    """The kind of message in a subject; empty when it names none."""
    return subject.split(".", 3)[2] if subject.count(".") > 2 else ""


def window_key_of(identity: str) -> WindowKey | None:
    """The window in an identity that ends in generation and window; `None` for other identities."""
    parts = identity.rsplit(":", 2)
    if len(parts) < 3 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return WindowKey(int(parts[1]), int(parts[2]))


class CaptureHeader(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """Description of a capture before its first record."""

    job: Token
    created: str
    """When the capture began, UTC, RFC 3339."""
    fingerprint: Fingerprint
    """Fingerprint of the program that captured; a replay is byte-identical where its own is equal."""

    @classmethod
    def of(cls, job: str) -> Self:
        """The header of a capture that this program makes of a job now."""
        created = dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return cls(job=job, created=created, fingerprint=fingerprint())


class CaptureEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The last frame of a complete capture."""

    reason: EndReason
    num_records: int


Content = CaptureHeader | list[Record] | CaptureEnd
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Content] = msgspec.msgpack.Decoder(Content)


class CaptureError(ValueError):
    """The file is no capture, or damaged; the message names the damage and the number of good records.

    Attributes:
        offset: byte at which the frame begins that cannot be used.
        num_records: records before it; all of them are good.
    """

    def __init__(self, path: Path, reason: str, *, offset: int = 0, num_records: int = 0) -> None:
        location = f" at byte {offset}" if offset else ""
        good = f"; the {num_records} records before it are good" if num_records else ""
        super().__init__(f"{path}{location}: {reason}{good}")
        self.offset = offset
        self.num_records = num_records


class CutOffError(CaptureError):
    """A capture without its end: the writer was killed, or the file was truncated. Its records are good."""


class CaptureWriter:
    """`with CaptureWriter(path, header) as writer: writer.write_record(record)`; `finish` completes the file.

    Leaving the context without an error finishes it, too. After an error or a kill a reader finds the records so far,
    and reports the file as cut off. An existing file is replaced.

    Attributes:
        num_records: records written.
        num_bytes: bytes of the file so far, without the block that is not complete.
    """

    def __init__(self, path: Path | str, header: CaptureHeader) -> None:
        self._path = Path(path)
        self._header = header
        self._last_sequences: dict[str, int] = {}
        self._block: list[Record] = []
        self._block_bytes = 0
        self._is_finished = False
        self.num_records = 0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        """Open the file and write the header.

        Raises:
            RefusedOutputError: when it is no regular file: a capture grows, and is cut off before it begins.
            OSError: when it cannot be written.
        """
        output_files.check(self._path)
        self._file = self._path.open("wb")
        self.num_bytes = self._file.write(PREAMBLE)
        self._write_frame(self._header)
        self._file.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file: complete without an error, otherwise with the records so far."""
        try:
            if kind is None:
                self.finish()
            elif not issubclass(kind, OSError):
                self.flush()
        finally:
            self._file.close()

    def write_record(self, record: Record) -> None:
        """Append a record.

        Raises:
            ValueError: when its sequence is not after the last one of its stream.
            OSError: when the file cannot be written.
        """
        if reason := _disorder(record, self._last_sequences):
            raise ValueError(reason)
        self._block.append(record)
        self._block_bytes += RECORD_BYTES + len(record.subject) + len(record.message_id) + len(record.payload)
        self.num_records += 1
        if self._block_bytes >= BLOCK_BYTES:
            self._close_block()

    def flush(self) -> None:
        """Pass all records so far to the system: a reader sees them even if this process is killed."""
        self._close_block()
        self._file.flush()

    def finish(self, reason: EndReason = "ended") -> CaptureEnd:
        """Write the end; no record can follow it. A second call changes nothing."""
        end = CaptureEnd(reason=reason, num_records=self.num_records)
        if not self._is_finished:
            self._close_block()
            self._write_frame(end)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._is_finished = True
        return end

    def _close_block(self) -> None:
        if self._block:
            self._write_frame(self._block)
            self._block, self._block_bytes = [], 0

    def _write_frame(self, content: Content) -> None:
        body = zlib.compress(_encoder.encode(content))
        self.num_bytes += self._file.write(FRAME.pack(MARKER, len(body), zlib.crc32(body)) + body)


def _disorder(record: Record, last_sequences: dict[str, int]) -> str:
    """Why the record cannot follow the last one of its stream, empty if it can; it is the last one from then on."""
    last = last_sequences.get(record.stream, 0)
    last_sequences[record.stream] = record.sequence
    return "" if record.sequence > last else f"{record.stream} {record.sequence} comes after {last}: not in order"


class CaptureReader:
    """`with CaptureReader(path) as reader: for record in reader: ...`. Memory does not grow with the file.

    Iteration gives the records once, up to the first damage or the cut, and then sets `fault`.

    Raises:
        CaptureError: when the file is no capture, or its header is damaged.
        OSError: when the file cannot be read.

    Attributes:
        header: known once the context is entered.
        end: known once the last record was read; `None` before, and in a file that is damaged or cut off.
        fault: what is damaged, or where the file is cut off.
        malformed: subject and reason of each message that `messages` could not decode.
        num_records: records of the blocks read so far.
    """

    header: CaptureHeader

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._offset = 0
        self.end: CaptureEnd | None = None
        self.fault: CaptureError | None = None
        self.malformed: list[tuple[str, str]] = []
        self.num_records = 0

    def __enter__(self) -> Self:
        check_regular(self._path)
        self._file = self._path.open("rb")
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records that were not read yet."""
        try:
            yield from self._records()
        except CaptureError as error:
            self.fault = error

    def messages(self) -> Iterator[tuple[Record, Message | None]]:
        """The records, each with its message; `None` where that cannot be decoded."""
        for record in self:
            message = None
            try:
                message = decode_any(record.subject, record.payload)
            except MalformedMessageError as error:
                self.malformed.append((record.subject, str(error)))
            yield record, message

    def _records(self) -> Iterator[Record]:
        last_sequences: dict[str, int] = {}
        while not isinstance(content := self._read_frame(), CaptureEnd):
            if isinstance(content, CaptureHeader):
                raise self._damage("a second header")
            for record in content:
                if reason := _disorder(record, last_sequences):
                    raise self._damage(reason)
            self.num_records += len(content)
            yield from content
        if content.num_records != self.num_records:
            raise self._damage(f"{content.num_records} records were written, {self.num_records} are there")
        self.end = content
        if self._file.read(1):
            raise self._damage("the file goes on behind the end of the capture")

    def _read_header(self) -> CaptureHeader:
        preamble = self._file.read(len(PREAMBLE))
        if preamble[: len(MAGIC)] != MAGIC:
            raise CaptureError(self._path, "this is no capture; `dynamix capture JOB -o FILE` makes one")
        if preamble != PREAMBLE:
            raise CaptureError(self._path, f"another version of the format, this program reads {VERSION}")
        if not isinstance(header := self._read_frame(), CaptureHeader):
            raise self._damage("the header is missing")
        return header

    def _read_frame(self) -> Content:
        """Read the content of the next frame.

        Raises:
            CaptureError: when it is damaged.
            CutOffError: when the file ends before the frame does.
        """
        self._offset = self._file.tell()
        head = self._file.read(FRAME.size)
        marker, length, checksum = FRAME.unpack(head.ljust(FRAME.size, b"\0"))
        if len(head) == FRAME.size and marker != MARKER:
            raise self._damage("no frame begins here")
        if length > MAX_FRAME_BYTES:
            raise self._damage(f"a length of {length} bytes, over the limit of {MAX_FRAME_BYTES}")
        body = self._file.read(length)
        if len(head) < FRAME.size or len(body) < length:
            if MARKER in body:  # a damaged length
                raise self._damage("the frame goes on beyond the end of the file")
            raise CutOffError(self._path, "the file is cut off here", offset=self._offset, num_records=self.num_records)
        if zlib.crc32(body) != checksum:
            raise self._damage("the content does not match its checksum")
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(body, MAX_FRAME_BYTES)
            if not inflater.eof or inflater.unused_data:
                raise self._damage(f"the content is not one of at most {MAX_FRAME_BYTES} bytes")
            return _decoder.decode(data)
        except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damage(f"the content cannot be unpacked ({error})") from error

    def _damage(self, reason: str) -> CaptureError:
        return CaptureError(self._path, reason, offset=self._offset, num_records=self.num_records)


def read_header(path: Path | str) -> CaptureHeader:
    """Read the header of a capture. Raises as `CaptureReader`."""
    with CaptureReader(path) as reader:
        return reader.header


def records(path: Path | str) -> Iterator[Record]:
    """Read the records of a capture in order. Raises as `CaptureReader`, and at the first damage."""
    with CaptureReader(path) as reader:
        yield from reader
        if reader.fault is not None:
            raise reader.fault


class RecordMerge:
    """Takes records stream by stream and returns them in one order.

    Within a stream the order is the broker's sequence; decisions depend on that of FEED. Between streams there is only
    the broker's time: the earlier message comes first, and at the same nanosecond that of the first stream in
    `STREAMS`. Where the broker's clock was set back, a stream's later messages count as stored at the latest time
    seen in that stream. The order depends only on what is stored, so that two captures of a job agree.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, int, Record]] = []
        """A heap: time, number of the stream, sequence."""
        self._newest_ns = dict.fromkeys(STREAMS, 0)

    def add_record(self, record: Record) -> None:
        """Queue the next record of its stream."""
        newest = max(self._newest_ns[record.stream], record.timestamp_ns)
        self._newest_ns[record.stream] = newest
        heapq.heappush(self._waiting, (newest, STREAMS.index(record.stream), record.sequence, record))

    def pop_until(self, time_ns: int = FOREVER_NS) -> Iterator[Record]:
        """Remove and return the records up to a time, that time included, in order.

        The caller has added every record of every stream that the broker stored up to then.
        """
        while self._waiting and self._waiting[0][0] <= time_ns:
            yield heapq.heappop(self._waiting)[-1]
