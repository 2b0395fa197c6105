"""What a stopped broker has on the disk: one bit of one record of a stream's file, the other way."""

from itertools import pairwise
from pathlib import Path

_HEADER_BYTES = 22
"""Length (4, its top bit says that headers follow), sequence (8), time (8), length of the subject (2)."""
_HASH_BYTES = 8


def flip_bit(store: Path, stream: str, index: int, *, in_header: bool) -> None:
    """Change a small stream's record: a bit of its length, or one in the middle of what was published."""
    (block,) = store.glob(f"jetstream/*/streams/{stream}/msgs/*.blk")
    data = bytearray(block.read_bytes())
    ends = [0]
    while ends[-1] < len(data):
        length = int.from_bytes(data[ends[-1] : ends[-1] + 4], "little") & ~(1 << 31)
        assert length > _HEADER_BYTES + _HASH_BYTES, f"{block} is not in the format that this was written for"
        ends.append(ends[-1] + length)
    begin, end = list(pairwise(ends))[index]
    if in_header:
        data[begin] ^= 1 << 4
    else:
        data[end - _HASH_BYTES - 20] ^= 1
    block.write_bytes(data)
