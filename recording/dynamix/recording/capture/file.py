"""The file of a capture: frames with a digest each, and records packed into blocks; its writer and its reader.

A file is `MAGIC`, a version byte, then frames: one header, blocks, one end. All numbers are little-endian.

    frame    marker (8 bytes), kind (1: H, B or E), index (4: 0 for the header), length (4), body, digest (32)
    digest   SHA-256 of the header's digest (of `PREAMBLE` for the header itself) and of the frame before it
    header   JSON, a CaptureHeader
    block    zlib, of records one after the other
    record   stream (1: index into the header's streams), length of subject (1), of message id (2), of payload (4),
             sequence (8), time in ns (8), subject, message id, payload
    end      JSON, a CaptureEnd

A block is used only after its digest was checked, and by itself: a reader that meets a damaged one goes on at the next
marker. Each length has a limit that is checked before memory is allocated. Flushed records stay readable when the
writer is killed.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

import msgspec

from dynamix.runtime import output_files
from dynamix.runtime.input_files import check_regular

from .record import (
    MAX_MESSAGE_ID_BYTES,
    MAX_PAYLOAD_BYTES,
    CaptureEnd,
    CaptureError,
    CaptureHeader,
    CutOffError,
    EndReason,
    Record,
    StreamRange,
    fits,
    identity_of,
    window_key_of,
)

MAGIC = b"\x89DXC\r\n\x1a\n"
"""Not text, and damaged by any tool that converts line ends."""
VERSION = 2
PREAMBLE = MAGIC + bytes((VERSION,))

MARKER = b"\x89DXF\r\n\x1a\n"
HEADER, BLOCK, END = b"H", b"B", b"E"
FRAME = struct.Struct("<8scII")
DIGEST_BYTES = 32
RECORD = struct.Struct("<BBHIQQ")

BLOCK_BYTES = 16 * 1024
"""A block is closed when its records have this many bytes: so much is lost by a damaged one."""
MAX_BLOCK_BYTES = BLOCK_BYTES + RECORD.size + 256 + MAX_MESSAGE_ID_BYTES + MAX_PAYLOAD_BYTES
"""The last record of a block may be a large one."""
MAX_BODY_BYTES = {
    HEADER: 64 * 1024,
    BLOCK: MAX_BLOCK_BYTES + MAX_BLOCK_BYTES // 1000 + 64,  # zlib's own worst case is less
    END: 64 * 1024,
}
COMPRESSION_LEVEL = 6
SEARCH_BYTES = 1 << 16

S = TypeVar("S", bound=msgspec.Struct)


def pack(record: Record, stream: int) -> bytes:
    """Pack a record of the stream with that index; the caller has checked that it `fits`."""
    subject, message_id = record.subject.encode(), record.message_id.encode()
    head = RECORD.pack(stream, len(subject), len(message_id), len(record.payload), record.sequence, record.timestamp_ns)
    return b"".join((head, subject, message_id, record.payload))


def decompress(body: bytes) -> bytes:
    """Decompress the body of a block's frame to packed records; raises ValueError when it is none, or too large."""
    inflater = zlib.decompressobj()
    try:
        block = inflater.decompress(body, MAX_BLOCK_BYTES)
    except zlib.error as error:
        raise ValueError(f"its content cannot be unpacked ({error})") from error
    if not inflater.eof:
        raise ValueError(f"its content is cut off, or larger than the {MAX_BLOCK_BYTES} bytes of a block")
    if inflater.unused_data:
        raise ValueError(f"{len(inflater.unused_data)} bytes follow its content")
    return block


def unpack(block: bytes, streams: Sequence[str]) -> list[Record]:
    """Unpack the records of a block.

    Raises:
        ValueError: when lengths or names are not those of records.
    """
    found, at, end = [], 0, len(block)
    while at < end:
        start = at + RECORD.size
        if start > end:
            raise ValueError("its last record is cut off")
        stream, subject_bytes, id_bytes, payload_bytes, sequence, timestamp_ns = RECORD.unpack_from(block, at)
        after_subject = start + subject_bytes
        after_id = after_subject + id_bytes
        at = after_id + payload_bytes
        if at > end:
            raise ValueError("its last record is cut off")
        if stream >= len(streams):
            raise ValueError(f"a record is of stream {stream}, but the header names {len(streams)}")
        subject, message_id = block[start:after_subject].decode(), block[after_subject:after_id].decode()
        found.append(Record(streams[stream], sequence, timestamp_ns, subject, message_id, block[after_id:at]))
    return found


class CaptureWriter:
    """`with CaptureWriter(path, header) as writer: writer.write_record(record)`; `finish` completes the file.

    Leaving the context without an error finishes it, too. After an error or a kill a reader finds the records so far,
    and reports the file as cut off.

    Attributes:
        num_records: records written.
        num_bytes: bytes of the file so far, without the block that is not complete.
        num_left_out: records that do not fit (`dynamix.recording.capture.fits`).
    """

    def __init__(self, path: Path | str, header: CaptureHeader, *, overwrite: bool = False) -> None:
        self._path = Path(path)
        self._mode = "wb" if overwrite else "xb"
        self._header = header
        self._streams = {stream: index for index, stream in enumerate(header.streams)}
        self._ranges: dict[str, StreamRange] = {}
        self._block = bytearray()
        self._seed = PREAMBLE
        self._file: BinaryIO | None = None
        self._is_finished = False
        self._num_frames = 0
        self.num_records = 0
        self.num_bytes = 0
        self.num_left_out = 0

    def __enter__(self) -> Self:
        """Open the file and write the header.

        Raises:
            FileExistsError: without `overwrite`, when there is one.
            RefusedOutputError: when it is no regular file: a capture grows, and is cut off before it begins.
            OSError: when it cannot be written.
        """
        output_files.check(self._path)
        self._file = self._path.open(self._mode)  # type: ignore[assignment] # a binary mode
        self._write(PREAMBLE)
        self._write_frame(HEADER, msgspec.json.encode(self._header))
        self._opened.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file: complete without an error, otherwise with the records so far."""
        try:
            if kind is None:
                self.finish()
            elif not issubclass(kind, OSError):
                self.flush()
        finally:
            if self._file is not None:
                self._file.close()

    def write_record(self, record: Record) -> None:
        """Append a record; a record that does not fit is left out and counted.

        Raises:
            ValueError: when its stream is not in the header, or its sequence is not after the stream's last one.
            OSError: when the file cannot be written.
        """
        if (index := self._streams.get(record.stream)) is None:
            raise ValueError(f"stream {record.stream!r} is not in the header, which has {', '.join(self._streams)}")
        known = self._ranges.get(record.stream)
        if known is not None and record.sequence <= known.last_sequence:
            raise ValueError(f"{record.stream} {record.sequence} comes after {known.last_sequence}: not in order")
        if not fits(record):
            self.num_left_out += 1
            return
        self._ranges[record.stream] = StreamRange(
            first_sequence=known.first_sequence if known else record.sequence,
            last_sequence=record.sequence,
            num_records=known.num_records + 1 if known else 1,
        )
        self._block += pack(record, index)
        self.num_records += 1
        if len(self._block) >= BLOCK_BYTES:
            self._close_block()

    def flush(self) -> None:
        """Pass all records so far to the system: a reader sees them even if this process is killed."""
        self._close_block()
        self._opened.flush()

    def finish(self, reason: EndReason = "ended") -> CaptureEnd:
        """Write the end; no record can follow it. A second call changes nothing."""
        end = CaptureEnd(
            reason=reason, num_records=self.num_records, ranges=self._ranges, num_left_out=self.num_left_out
        )
        if not self._is_finished:
            self._close_block()
            self._write_frame(END, msgspec.json.encode(end))
            self._opened.flush()
            os.fsync(self._opened.fileno())
            self._is_finished = True
        return end

    def _close_block(self) -> None:
        if self._block and not self._is_finished:
            self._write_frame(BLOCK, zlib.compress(self._block, COMPRESSION_LEVEL))
            self._block.clear()

    def _write_frame(self, kind: bytes, body: bytes) -> None:
        if len(body) > MAX_BODY_BYTES[kind]:
            raise ValueError(f"a frame of {len(body)} bytes is over the limit of {MAX_BODY_BYTES[kind]}")
        frame = FRAME.pack(MARKER, kind, self._num_frames, len(body)) + body
        digest = hashlib.sha256(self._seed + frame).digest()
        if kind == HEADER:
            self._seed = digest
        self._write(frame + digest)
        self._num_frames += 1

    def _write(self, data: bytes) -> None:
        self._opened.write(data)
        self.num_bytes += len(data)

    @property
    def _opened(self) -> BinaryIO:
        assert self._file is not None, "used within its context"
        return self._file


def read_header(path: Path | str) -> CaptureHeader:
    """Read the header of a capture. Raises as `CaptureReader`."""
    with CaptureReader(path) as reader:
        return reader.header


def records(path: Path | str) -> Iterator[Record]:
    """Read the records of a capture in order. Raises as `CaptureReader`, also after the last good record."""
    with CaptureReader(path) as reader:
        yield from reader


def first_generation(path: Path) -> int:
    """The first generation that a capture has a message of, 0 when it has none. Raises as `records`."""
    found = (window_key_of(identity_of(record)) for record in records(path))
    return next((key.generation for key in found if key is not None), 0)


class CaptureReader:
    """`with CaptureReader(path) as reader: for record in reader: ...`. Memory does not grow with the file.

    Raises:
        CaptureError: when the file is no capture, or at a damaged block; every record before it was good. To iterate
            again then goes on after that block; `good_records` does so.
        CutOffError: a CaptureError, where the file ends before its end was written.
        OSError: when the file cannot be read.

    Attributes:
        header: known once the context is entered.
        end: known once the last record was read, `None` before.
        num_records: records of the blocks read so far.
        faults: what `good_records` left out.
    """

    header: CaptureHeader

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._seed = PREAMBLE
        self._frame_index = -1
        self._frame_offset = 0
        self._offset = 0
        self._last_sequences: dict[str, int] = {}
        self.end: CaptureEnd | None = None
        self.num_records = 0
        self.faults: list[CaptureError] = []

    def __enter__(self) -> Self:
        check_regular(self._path)
        self._file = self._path.open("rb")
        try:
            self._check_preamble()
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records that were not read yet."""
        while self.end is None:
            block = self._next_block()
            self.num_records += len(block)
            yield from block

    def good_records(self) -> Iterator[Record]:
        """The records of all good blocks; what is wrong with the others is added to `faults`."""
        while self.end is None:
            try:
                yield from self
            except CaptureError as error:
                self.faults.append(error)
                if isinstance(error, CutOffError):
                    return

    def _next_block(self) -> list[Record]:
        """Read the next block's records; none at the end."""
        kind, body = self._read_frame()
        try:
            if kind == BLOCK:
                block = unpack(decompress(body), self.header.streams)
                self._check_order(block)
                return block
        except ValueError as error:
            raise self._damage(str(error)) from error
        if kind == HEADER:
            raise self._damage("a second header")
        self.end = end = self._decode_json(body, CaptureEnd)
        if self._read_some(1):
            raise self._damage(f"the capture ends at byte {self._offset - 1}, but the file goes on")
        if end.num_records != self.num_records and not self.faults:
            raise self._damage(f"the end declares {end.num_records} records, {self.num_records} are there")
        return []

    def _check_preamble(self) -> None:
        preamble = self._read_some(len(PREAMBLE))
        if preamble[: len(MAGIC)] != MAGIC:
            raise CaptureError(self._path, "this is no capture; `dynamix capture JOB -o FILE` makes one")
        if preamble != PREAMBLE:
            found = preamble[len(MAGIC) :]
            version = f"version {found[0]}" if found else "no version"
            raise CaptureError(self._path, f"a capture of {version}, this program reads {VERSION}")

    def _read_header(self) -> CaptureHeader:
        kind, body = self._read_frame()
        if kind != HEADER:
            raise self._damage("the header is missing")
        return self._decode_json(body, CaptureHeader)

    def _read_frame(self) -> tuple[bytes, bytes]:
        """Read the next frame's kind and body, and check its digest; where it is damaged, go to the next marker."""
        self._frame_index += 1
        self._frame_offset = self._offset
        try:
            head = self._read_exactly(FRAME.size)
            marker, kind, index, length = FRAME.unpack(head)
            if marker != MARKER or kind not in MAX_BODY_BYTES:
                raise self._damage("no block begins here")
            if length > (limit := MAX_BODY_BYTES[kind]):
                raise self._damage(f"a length of {length} bytes, over the limit of {limit}")
            body = self._read_exactly(length)
            digest = hashlib.sha256(self._seed + head + body).digest()
            if self._read_exactly(DIGEST_BYTES) != digest:
                raise self._damage("its content does not match its checksum")
        except CaptureError as error:
            if self._find_marker() and isinstance(error, CutOffError):
                raise self._damage("it goes on beyond the end of the file") from error
            raise
        if index != self._frame_index:
            misplaced = self._damage(f"block {index} stands here")
            if index > self._frame_index:  # some are missing: the next call reads this one
                self._offset = self._frame_offset
                self._opened.seek(self._offset)
            self._frame_index = max(self._frame_index, index) - 1
            raise misplaced
        if index == 0:
            self._seed = digest
        return kind, body

    def _find_marker(self) -> bool:
        """Go to the first marker after the one of this frame; to the end of the file, and False, without one."""
        self._offset = self._frame_offset + 1
        self._opened.seek(self._offset)
        seen = b""
        while chunk := self._opened.read(SEARCH_BYTES):
            seen += chunk
            if (at := seen.find(MARKER)) >= 0:
                self._offset += at
                self._opened.seek(self._offset)
                return True
            self._offset += max(0, len(seen) - len(MARKER) + 1)
            seen = seen[-len(MARKER) + 1 :]
        self._offset += len(seen)
        return False

    def _read_exactly(self, length: int) -> bytes:
        data = self._read_some(length)
        if len(data) < length:
            raise CutOffError(self._path, "the file is cut off here", **self._location())
        return data

    def _read_some(self, length: int) -> bytes:
        data = self._opened.read(length)
        self._offset += len(data)
        return data

    def _decode_json(self, body: bytes, kind: type[S]) -> S:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._damage(f"not a {kind.__name__}: {error}") from error

    def _check_order(self, block: list[Record]) -> None:
        last = self._last_sequences
        for record in block:
            if record.sequence <= last.get(record.stream, 0):
                raise ValueError(f"{record.stream} {record.sequence} comes after {last[record.stream]}: not in order")
            last[record.stream] = record.sequence

    def _damage(self, reason: str) -> CaptureError:
        return CaptureError(self._path, reason, **self._location())

    def _location(self) -> dict[str, int]:
        return {"block": self._frame_index, "offset": self._frame_offset, "num_records": self.num_records}

    @property
    def _opened(self) -> BinaryIO:
        assert self._file is not None, "used within its context"
        return self._file
