"""What a stopped broker has on the disk: the records of a stream's file, and one bit of one of them the other way."""

from pathlib import Path
from typing import NamedTuple

_HEADER_BYTES = 22
"""Length (4, its top bit says that headers follow), sequence (8), time (8), length of the subject (2)."""
_HASH_BYTES = 8


class BlockRecord(NamedTuple):
    """One stored message."""

    offset: int
    length: int
    sequence: int
    subject: str


def block_of(store: Path, stream: str) -> Path:
    """The one file that holds a small stream."""
    (block,) = store.glob(f"jetstream/*/streams/{stream}/msgs/*.blk")
    return block


def records(block: Path) -> list[BlockRecord]:
    """All records, in order."""
    data, offset, found = block.read_bytes(), 0, []
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 4], "little") & ~(1 << 31)
        sequence = int.from_bytes(data[offset + 4 : offset + 12], "little")
        end = offset + _HEADER_BYTES + int.from_bytes(data[offset + 20 : offset + 22], "little")
        subject = data[offset + _HEADER_BYTES : end].decode()
        assert length > _HEADER_BYTES + _HASH_BYTES, f"{block} is not in the format that this was written for"
        found.append(BlockRecord(offset, length, sequence, subject))
        offset += length
    return found


def flip_in_header(block: Path, record: BlockRecord) -> None:
    """A bit of the record's length."""
    _flip(block, record.offset, 4)


def flip_in_payload(block: Path, record: BlockRecord) -> None:
    """A bit in the middle of what was published."""
    _flip(block, record.offset + record.length - _HASH_BYTES - 20, 0)


def _flip(block: Path, offset: int, bit: int) -> None:
    data = bytearray(block.read_bytes())
    data[offset] ^= 1 << bit
    block.write_bytes(data)
