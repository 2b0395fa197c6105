"""The bytes of a capture: frames with a digest each, and records packed into blocks. No I/O.

A file is `MAGIC`, a version byte, then frames: one header, blocks, one end. All numbers are little-endian.

    frame    marker (8 bytes), kind (1: H, B or E), index (4: 0 for the header), length (4), body, digest (32)
    digest   SHA-256 of the header's digest (of `PREAMBLE` for the header itself) and of the frame before it
    header   JSON, a CaptureHeader
    block    zlib, of records one after the other
    record   stream (1: index into the header's streams), length of subject (1), of message id (2), of payload (4),
             sequence (8), time in ns (8), subject, message id, payload
    end      JSON, a CaptureEnd

A block is used only after its digest was checked, and by itself: a reader that meets a damaged one goes on at the next
marker. Each length has a limit that is checked before memory is allocated.
"""

import struct
import zlib
from collections.abc import Sequence

from .record import MAX_MESSAGE_ID_BYTES, MAX_PAYLOAD_BYTES, Record

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


def pack(record: Record, stream: int) -> bytes:
    """Pack a record of the stream with that index; the caller has checked that it `fits`."""
    subject, message_id = record.subject.encode(), record.message_id.encode()
    head = RECORD.pack(stream, len(subject), len(message_id), len(record.payload), record.sequence, record.timestamp_ns)
    return b"".join((head, subject, message_id, record.payload))


def compress(block: bytes | bytearray) -> bytes:
    """Compress packed records to the body of a block's frame."""
    return zlib.compress(block, COMPRESSION_LEVEL)


def decompress(body: bytes) -> bytes:
    """Decompress the body of a block's frame to packed records.

    Raises:
        ValueError: when the body is not the output of `compress`, or larger than a block may be.
    """
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
